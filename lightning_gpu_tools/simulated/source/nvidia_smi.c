// nvidia-smi, of which only: -L, and --query-gpu=FIELDS --format=csv[,noheader][,nounits]
#include "machine.h"
#include <stdio.h>
#include <string.h>

static int print(const char *field, int gpu, int index, int units) {
  const struct machine *m = machine_open();
  const struct gpu *g = &m->gpu[gpu];
  const char *mib = units ? " MiB" : "";
  i64 now = machine_now();
  if (m->state->set[gpu].lost_at) return printf("[GPU is lost]");
  if (!strcmp(field, "index")) return printf("%d", index);
  if (!strcmp(field, "uuid") || !strcmp(field, "gpu_uuid")) return printf("%s", g->uuid);
  if (!strcmp(field, "name") || !strcmp(field, "gpu_name")) return printf("%s", g->name);
  if (!strcmp(field, "driver_version")) return printf("simulated");
  if (!strcmp(field, "memory.total")) return printf("%zu%s", g->memory >> 20, mib);
  if (!strcmp(field, "memory.used")) return printf("%zu%s", machine_used(gpu) >> 20, mib);
  if (!strcmp(field, "memory.free")) return printf("%zu%s", (g->memory - machine_used(gpu)) >> 20, mib);
  if (!strcmp(field, "utilization.gpu"))
    return printf("%d%s", (int)(machine_busy(gpu, NULL, now - 1000000000 / 6, now) * 6 / 10000000), units ? " %" : "");
  return printf("[Not Supported]");
}
int main(int count, char **arguments) {
  const struct machine *m = machine_open();
  char *fields = NULL, *format = "";
  if (!m) {
    fprintf(stderr, "No simulated machine in $SIMULATED_CUDA.\n");
    return 9;
  }
  for (int i = 1; i < count; i++) {
    if (!strncmp(arguments[i], "--query-gpu=", 12))
      fields = arguments[i] + 12;
    else if (!strncmp(arguments[i], "--format=", 9))
      format = arguments[i] + 9;
    else if (strcmp(arguments[i], "-L")) {
      fprintf(stderr, "The simulated nvidia-smi has -L and --query-gpu=FIELDS --format=csv, not %s.\n", arguments[i]);
      return 2;
    }
  }
  if (fields && !strstr(format, "noheader")) printf("%s\n", fields);
  for (int i = 0, index = 0; i < m->gpus; i++) {
    const struct gpu *g = &m->gpu[i];
    char copy[1024], *rest;
    if (g->parent >= 0) {
      if (!fields) printf("  MIG Device %d: (UUID: %s)\n", i - g->parent - 1, g->uuid);
      continue;
    }
    if (!fields) {
      printf("GPU %d: %s (simulated) (UUID: %s)\n", index++, g->name, g->uuid);
      continue;
    }
    snprintf(copy, sizeof copy, "%s", fields);
    for (char *field = strtok_r(copy, ",", &rest), *separator = ""; field;
         field = strtok_r(NULL, ",", &rest), separator = ", ") {
      printf("%s", separator);
      print(field, i, index, !strstr(format, "nounits"));
    }
    printf("\n");
    index++;
  }
  return 0;
}
