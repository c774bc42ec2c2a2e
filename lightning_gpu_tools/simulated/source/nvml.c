// The driver's management library, libnvidia-ml.so.1: what the processes of the simulated machine do, as NVML says it.
#define _GNU_SOURCE
#include "machine.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  OK,
  UNINITIALIZED,
  INVALID_ARGUMENT,
  NOT_SUPPORTED,
  NO_PERMISSION,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  DRIVER_NOT_LOADED = 9
};
#define SECOND 1000000000LL
#define PERIOD (SECOND / 6) // of the driver's utilization samples, of which it keeps 120
#define SAMPLES 120
#define CLOCK_MHZ 1980
#define CLOCK_SM 1 // nvmlClockType_t: 0 is graphics, and those after SM are of the memory and of video
#define DEVICE const struct gpu *g
// What every question about a GPU begins with.
#define ASKED                                                                                                          \
  if (!machine) return UNINITIALIZED;                                                                                  \
  if (!is_gpu(g)) return INVALID_ARGUMENT;
#define WHOLE ASKED if (g->parent >= 0) return NOT_SUPPORTED;
static const struct machine *machine;
static int opened;

static int is_gpu(DEVICE) { return g >= machine->gpu && g < machine->gpu + machine->gpus; }
static int number(DEVICE) { return g - machine->gpu; }
static i64 microseconds(i64 at) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (t.tv_sec * SECOND + t.tv_nsec - machine_now() + at) / 1000;
}
static int text(char *to, unsigned size, const char *from) {
  if (strlen(from) + 1 > size) return INSUFFICIENT_SIZE;
  strcpy(to, from);
  return OK;
}
static const struct gpu *nth(unsigned n) {
  for (int i = 0; i < machine->gpus; i++)
    if (machine->gpu[i].parent < 0 && !n--) return &machine->gpu[i];
  return NULL;
}
static const struct gpu *instance(DEVICE, unsigned n) {
  for (int i = 0; i < machine->gpus; i++)
    if (machine->gpu[i].parent == number(g) && !n--) return &machine->gpu[i];
  return NULL;
}
static int percent(DEVICE, i64 begin, i64 end) {
  return end > begin ? (int)(100.0 * machine_busy(number(g), NULL, begin, end) / (end - begin) + .5) : 0;
}
static double energy_nj(DEVICE) {
  i64 now = machine_now();
  return g->idle_w * now + (g->limit_w - g->idle_w) * machine_busy_until(number(g), now);
}
static double watts(DEVICE) {
  i64 now = machine_now();
  return g->idle_w + (g->limit_w - g->idle_w) * percent(g, now - PERIOD, now) / 100;
}

int nvmlInitWithFlags(unsigned flags) {
  machine = machine_open();
  if (!machine) return DRIVER_NOT_LOADED;
  opened++;
  return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
  if (!opened) return UNINITIALIZED;
  if (!--opened) machine = NULL;
  return OK;
}
const char *nvmlErrorString(int code) { return code ? "an error of the simulated driver" : "Success"; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return OK;
}

int nvmlDeviceGetCount_v2(unsigned *n) {
  if (!machine) return UNINITIALIZED;
  for (*n = 0; nth(*n);) ++*n;
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, const struct gpu **to) {
  if (!machine) return UNINITIALIZED;
  DEVICE = nth(index);
  if (!g) return INVALID_ARGUMENT;
  *to = g;
  return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, const struct gpu **to) {
  if (!machine) return UNINITIALIZED;
  for (int i = 0; i < machine->gpus; i++)
    if (!strcmp(machine->gpu[i].uuid, uuid)) {
      *to = &machine->gpu[i];
      return OK;
    }
  return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, const struct gpu **to) {
  unsigned a, b, c, d, e, f;
  if (!machine) return UNINITIALIZED;
  for (int i = 0; i < machine->gpus; i++)
    if (machine->gpu[i].parent < 0 && sscanf(pci, "%x:%x:%x", &a, &b, &c) == 3 &&
        sscanf(machine->gpu[i].pci, "%x:%x:%x", &d, &e, &f) == 3 && a == d && b == e && c == f) {
      *to = &machine->gpu[i];
      return OK;
    }
  return NOT_FOUND;
}
int nvmlDeviceGetName(DEVICE, char *to, unsigned size) { ASKED return text(to, size, g->name); }
int nvmlDeviceGetUUID(DEVICE, char *to, unsigned size) { ASKED return text(to, size, g->uuid); }
int nvmlDeviceGetCudaComputeCapability(DEVICE, int *major, int *minor) {
  ASKED *major = g->major;
  *minor = g->minor;
  return OK;
}
struct pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char text[32];
};
int nvmlDeviceGetPciInfo_v3(DEVICE, struct pci *p) {
  ASKED memset(p, 0, sizeof *p);
  sscanf(g->pci, "%x:%x:%x", &p->domain, &p->bus, &p->device);
  snprintf(p->text, sizeof p->text, "%08X:%02X:%02X.0", p->domain, p->bus, p->device);
  snprintf(p->legacy, sizeof p->legacy, "%04X:%02X:%02X.0", p->domain & 0xFFFF, p->bus & 0xFF, p->device & 0xFF);
  return OK;
}
int nvmlDeviceGetComputeMode(DEVICE, int *mode) {
  ASKED *mode = 0;
  return OK;
}

int nvmlDeviceGetMigMode(DEVICE, unsigned *now, unsigned *pending) {
  WHOLE if (g->major < 8) return NOT_SUPPORTED;
  *now = *pending = g->mig_mode;
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(DEVICE, unsigned *n) {
  WHOLE *n = g->major < 8 ? 0 : 7;
  return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(DEVICE, unsigned index, const struct gpu **to) {
  WHOLE if (!g->mig_mode || index >= 7) return INVALID_ARGUMENT;
  *to = instance(g, index);
  return *to ? OK : NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(DEVICE, const struct gpu **to) {
  ASKED if (g->parent < 0) return INVALID_ARGUMENT;
  *to = &machine->gpu[g->parent];
  return OK;
}
int nvmlDeviceGetGpuInstanceId(DEVICE, unsigned *id) {
  ASKED if (g->parent < 0) return NOT_SUPPORTED;
  *id = number(g) - g->parent;
  return OK;
}

static size_t used(DEVICE) {
  size_t sum = machine_used(number(g));
  for (unsigned i = 0; g->mig_mode && instance(g, i); i++) sum += machine_used(number(instance(g, i)));
  return sum < g->memory ? sum : g->memory;
}
int nvmlDeviceGetMemoryInfo(DEVICE, unsigned long long *m) {
  ASKED m[0] = g->memory;
  m[2] = used(g);
  m[1] = m[0] - m[2];
  return OK;
}
struct memory_v2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
int nvmlDeviceGetMemoryInfo_v2(DEVICE, struct memory_v2 *m) {
  ASKED m->total = g->memory;
  m->reserved = g->reserved;
  m->used = used(g) - g->reserved;
  m->free = g->memory - used(g);
  return OK;
}

struct process_info {
  unsigned pid;
  unsigned long long memory;
  unsigned gpu_instance, compute_instance;
};
static int processes(DEVICE, unsigned *n, struct process_info *to) { // of an instance, or of all instances of a GPU
  unsigned found = 0;
  for (int i = 0; i < PROCESSES; i++)
    for (int k = 0; k < machine->gpus; k++) {
      const struct process *p = &machine->state->processes[i];
      int asked = k == number(g) || (g->mig_mode && machine->gpu[k].parent == number(g)),
          part = machine->gpu[k].parent >= 0;
      if (!asked || !p->pid || !p->uses[k].active || !machine_alive(p)) continue;
      if (to && found < *n)
        to[found] = (struct process_info){p->pid, p->uses[k].bytes + machine->gpu[k].context,
                                          part ? k - machine->gpu[k].parent : ~0u, part ? 0 : ~0u};
      found++;
    }
  int fits = found <= *n && (to || !found);
  *n = found;
  return fits ? OK : INSUFFICIENT_SIZE;
}
int nvmlDeviceGetComputeRunningProcesses_v3(DEVICE, unsigned *n, struct process_info *to) {
  ASKED return processes(g, n, to);
}
struct process_info_v1 {
  unsigned pid;
  unsigned long long memory;
};
int nvmlDeviceGetComputeRunningProcesses(DEVICE, unsigned *n, struct process_info_v1 *to) { // its first version
  ASKED struct process_info all[PROCESSES];
  unsigned found = PROCESSES, room = *n;
  processes(g, &found, all);
  *n = found;
  for (unsigned i = 0; to && i < found && i < room; i++) {
    to[i].pid = all[i].pid;
    to[i].memory = all[i].memory;
  }
  return found <= room ? OK : INSUFFICIENT_SIZE;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(DEVICE, unsigned *n, void *to) {
  ASKED *n = 0;
  return OK;
}
struct process_use {
  unsigned pid;
  unsigned long long at;
  unsigned sm, memory, encoder, decoder;
};
int nvmlDeviceGetProcessUtilization(DEVICE, struct process_use *to, unsigned *n, unsigned long long since) {
  WHOLE if (g->mig_mode) return NOT_SUPPORTED;
  unsigned found = 0;
  i64 now = machine_now();
  if ((unsigned long long)microseconds(now) <= since) return NOT_FOUND;
  for (int i = 0; i < PROCESSES; i++) {
    const struct process *p = &machine->state->processes[i];
    if (!p->pid || !p->uses[number(g)].active || !machine_alive(p)) continue;
    if (to && found < *n)
      to[found] = (struct process_use){p->pid, microseconds(now),
                                       100.0 * machine_busy(number(g), p, now - SECOND, now) / SECOND + .5};
    found++;
  }
  int fits = to && found <= *n;
  *n = found;
  return !found ? NOT_FOUND : fits ? OK : INSUFFICIENT_SIZE;
}

struct sample {
  unsigned long long at;
  union {
    unsigned u;
    double d;
  } value;
};
int nvmlDeviceGetSamples(DEVICE, int kind, unsigned long long since, int *type, unsigned *n, struct sample *to) {
  WHOLE if (g->mig_mode || kind != 1) return NOT_SUPPORTED; // NVML_GPU_UTILIZATION_SAMPLES
  *type = 1;
  if (!to) {
    *n = SAMPLES;
    return OK;
  }
  i64 newest = machine_now() / PERIOD * PERIOD;
  unsigned found = 0;
  i64 first = newest - (SAMPLES - 1) * PERIOD;
  if ((i64)*n < SAMPLES) first = newest - ((i64)*n - 1) * PERIOD;
  for (i64 end = first; end <= newest; end += PERIOD) {
    unsigned long long at =
        microseconds(end) / 1000 * 1000 + 500; // rounded: two readings of two clocks are never the same
    if (end > 0 && at > since + 1000) {
      to[found].at = at;
      to[found++].value.u = percent(g, end - PERIOD, end);
    }
  }
  *n = found;
  return found ? OK : NOT_FOUND;
}
int nvmlDeviceGetUtilizationRates(DEVICE, unsigned *rates) {
  WHOLE if (g->mig_mode) return NOT_SUPPORTED;
  i64 now = machine_now();
  rates[0] = percent(g, now - PERIOD, now);
  rates[1] = rates[0] / 2;
  return OK;
}
int nvmlDeviceGetPowerUsage(DEVICE, unsigned *milliwatts) {
  WHOLE *milliwatts = 1000 * watts(g);
  return OK;
}
int nvmlDeviceGetPowerManagementLimit(DEVICE, unsigned *milliwatts) {
  WHOLE *milliwatts = 1000 * g->limit_w;
  return OK;
}
int nvmlDeviceGetPowerManagementLimitConstraints(DEVICE, unsigned *least, unsigned *most) {
  WHOLE *least = 1000 * g->limit_w / 2;
  *most = 1000 * g->limit_w;
  return OK;
}
int nvmlDeviceGetTemperature(DEVICE, int sensor, unsigned *celsius) {
  WHOLE i64 now = machine_now();
  *celsius = 35 + percent(g, now - PERIOD, now) / 3;
  return OK;
}
int nvmlDeviceGetClockInfo(DEVICE, int kind, unsigned *mhz) {
  WHOLE if (kind > CLOCK_SM) return NOT_SUPPORTED;
  *mhz = CLOCK_MHZ;
  return OK;
}
int nvmlDeviceGetMaxClockInfo(DEVICE, int kind, unsigned *mhz) {
  WHOLE if (kind > CLOCK_SM) return NOT_SUPPORTED;
  *mhz = CLOCK_MHZ;
  return OK;
}
struct field {
  unsigned id, scope;
  long long at, took;
  int type, result;
  unsigned long long value;
};
int nvmlDeviceGetFieldValues(DEVICE, int n, struct field *f) {
  WHOLE
  for (; n--; f++) {
    f->at = microseconds(machine_now());
    f->type = 3;
    f->result = OK;
    f->value = 0;
    if (f->id == 83)
      f->value = energy_nj(g) / 1e6;
    else if (f->id != 4 && f->id != 74 && f->id != 75)
      f->result = NOT_SUPPORTED; // ECC errors and throttling: none
  }
  return OK;
}

// GPM, of Hopper and newer: means between two samples. Of its metrics only how busy the GPU was.
struct gpm_sample {
  int gpu;
  i64 at, busy;
};
struct gpm_metric {
  unsigned id;
  int result;
  double value;
  const char *names[3];
};
struct gpm_request {
  unsigned version, n;
  struct gpm_sample *first, *second;
  struct gpm_metric metrics[];
};
static int gpm(DEVICE, struct gpm_sample *s) {
  if (g->major < 9) return NOT_SUPPORTED;
  i64 now = machine_now();
  *s = (struct gpm_sample){number(g), now, machine_busy_until(number(g), now)};
  return OK;
}
int nvmlGpmQueryDeviceSupport(DEVICE, unsigned *support) {
  ASKED support[1] = g->major >= 9;
  return OK;
}
int nvmlGpmSampleAlloc(struct gpm_sample **s) {
  *s = calloc(1, sizeof **s);
  return OK;
}
int nvmlGpmSampleFree(struct gpm_sample *s) {
  free(s);
  return OK;
}
int nvmlGpmSampleGet(DEVICE, struct gpm_sample *s) { ASKED return gpm(g, s); }
int nvmlGpmMigSampleGet(DEVICE, unsigned id, struct gpm_sample *s) {
  ASKED int i = number(g) + id;
  return i < machine->gpus && machine->gpu[i].parent == number(g) ? gpm(&machine->gpu[i], s) : NOT_FOUND;
}
int nvmlGpmMetricsGet(struct gpm_request *r) {
  if (r->first->gpu != r->second->gpu || r->second->at <= r->first->at) return INVALID_ARGUMENT;
  double share = 100.0 * (r->second->busy - r->first->busy) / (r->second->at - r->first->at);
  for (unsigned i = 0; i < r->n; i++) {
    struct gpm_metric *m = &r->metrics[i];
    m->result = m->id == 1 || m->id == 2 ? OK : NOT_SUPPORTED;
    m->value = m->result ? 0 : share < 0 ? 0 : share > 100 ? 100 : share;
  }
  return OK;
}

int nvmlDeviceGetP2PStatus(DEVICE, const struct gpu *other, int capability, int *status) {
  WHOLE *status = capability != 2 || (g->nvlink && other->nvlink) ? 0 : 5;
  return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(DEVICE, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(DEVICE, unsigned link, void *pci) { return NOT_SUPPORTED; }
// No fabric: its state stays 0, "not supported".
int nvmlDeviceGetGpuFabricInfoV(DEVICE, void *info) { ASKED return OK; }
int nvmlDeviceGetMemoryAffinity(DEVICE, unsigned size, unsigned long *set, int scope) {
  ASKED memset(set, 0, size * sizeof *set);
  set[0] = 1;
  return OK;
}
