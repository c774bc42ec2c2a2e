#define _GNU_SOURCE
#include "machine.h"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000LL
#define AHEAD (12000 * MS) // beyond it, what is booked would overwrite the past in the rings
static struct machine machine;

i64 machine_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int read_gpu(FILE *file, struct gpu *g) { // from a line of machine.conf; a MIG instance follows its GPU
  int found = fscanf(file,
                     "%d %zu %zu %zu %d.%d %d %d %d %d %lf %lf %lf %lf %lf %lf %95s %31s %95[^\n]",
                     &g->parent, &g->memory, &g->reserved, &g->context, &g->major, &g->minor, &g->sms, &g->shared_kib,
                     &g->l2_mib, &g->nvlink, &g->bytes_per_ns, &g->flops_per_ns, &g->tf32_per_ns, &g->half_per_ns,
                     &g->idle_w, &g->limit_w, g->uuid, g->pci, g->name);
  if (found != 19) return 0;
  if (g->parent >= 0) machine.gpu[g->parent].mig_mode = 1;
  return 1;
}

static int open_state(void) {
  char path[4096];
  snprintf(path, sizeof path, "%s/machine.state", getenv("SIMULATED_CUDA"));
  return open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

const struct machine *machine_open(void) {
  const char *folder = getenv("SIMULATED_CUDA");
  if (machine.state) return &machine;
  if (!folder) return NULL;
  char path[4096];
  snprintf(path, sizeof path, "%s/machine.conf", folder);
  FILE *file = fopen(path, "re");
  if (!file) return NULL;
  fscanf(file, "%lf %lf %lf %lf", &machine.kernel_ns, &machine.pinned_per_ns, &machine.pageable_per_ns,
         &machine.nccl_per_ns);
  machine.gpus = 0;
  while (machine.gpus < GPUS && read_gpu(file, &machine.gpu[machine.gpus])) machine.gpus++;
  fclose(file);
  int f = open_state();
  if (f < 0) return NULL;
  void *state = ftruncate(f, sizeof *machine.state)
                    ? MAP_FAILED
                    : mmap(0, sizeof *machine.state, PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
  close(f);
  if (state == MAP_FAILED) return NULL;
  machine.state = state;
  return &machine;
}

static i64 birth_of(int pid) { // in ticks since the boot; 0 if the process has ended, also as a zombie
  char path[64], text[1024];
  char condition;
  unsigned long long birth = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int f = open(path, O_RDONLY | O_CLOEXEC);
  if (f < 0) return 0;
  ssize_t n = read(f, text, sizeof text - 1);
  close(f);
  if (n <= 0) return 0;
  text[n] = 0;
  char *rest = strrchr(text, ')'); // the name before it may hold anything
  if (!rest || sscanf(rest + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                      &condition, &birth) != 2)
    return 0;
  return condition == 'Z' || condition == 'X' ? 0 : (i64)birth;
}
int machine_alive(const struct process *p) { return p->pid && birth_of(p->pid) == p->birth; }

struct process *machine_join(void) {
  static struct process alone; // more processes than places: nobody else sees what this one does
  struct process *found = &alone;
  int f = open_state();
  flock(f, LOCK_EX); // processes that begin at once must not take the same place
  for (int i = 0; i < PROCESSES && found == &alone; i++) {
    struct process *p = &machine.state->processes[i];
    if (machine_alive(p)) continue;
    p->pid = 0;
    for (int g = 0; g < GPUS; g++) {
      p->uses[g].active = 0;
      p->uses[g].bytes = 0;
      p->uses[g].waiting_since = 0;
    }
    p->birth = birth_of(getpid()); // what the one before it did stays: the driver's buffer remembers it, too
    p->pid = getpid();
    found = p;
  }
  close(f);
  return found;
}

size_t machine_used(int gpu) {
  size_t used = machine.gpu[gpu].reserved + machine.state->others[gpu];
  for (int i = 0; i < PROCESSES; i++) {
    struct process *p = &machine.state->processes[i];
    if (p->pid && p->uses[gpu].active && machine_alive(p)) used += p->uses[gpu].bytes + machine.gpu[gpu].context;
  }
  return used < machine.gpu[gpu].memory ? used : machine.gpu[gpu].memory;
}

static uint32_t add(volatile uint64_t *bucket, i64 ms, i64 ns) { // returns how much of it is new
  uint64_t before, after;
  uint32_t had, has;
  do {
    before = *bucket;
    had = before >> 32 == (uint32_t)ms ? (uint32_t)before : 0;
    has = had + ns < MS ? had + ns : MS; // two streams or processes at the same time are not more than all of it
    after = (uint64_t)(uint32_t)ms << 32 | has;
  } while (!__sync_bool_compare_and_swap(bucket, before, after));
  return has - had;
}
void machine_book(struct process *p, int gpu, i64 begin, i64 end) {
  i64 last = machine_now() + AHEAD;
  if (end > last) end = last;
  if (end <= begin) return;
  for (i64 ms = begin / MS; ms * MS < end; ms++) {
    i64 from = begin > ms * MS ? begin : ms * MS, to = end < (ms + 1) * MS ? end : (ms + 1) * MS;
    add(&p->uses[gpu].buckets[ms % BUCKETS], ms, to - from);
    uint32_t more = add(&machine.state->buckets[gpu][ms % BUCKETS], ms, to - from);
    __sync_fetch_and_add(&machine.state->busy_ns[gpu], more);
  }
}

static i64 waiting(int gpu, const struct process *only, i64 begin, i64 end) { // what is not booked yet
  i64 most = 0;
  for (int i = 0; i < PROCESSES; i++) {
    const struct process *p = &machine.state->processes[i];
    i64 since = p->uses[gpu].waiting_since;
    if (!since || (only && p != only) || !machine_alive(p)) continue;
    if (since < begin) since = begin;
    if (end - since > most) most = end - since;
  }
  return most;
}

i64 machine_busy(int gpu, const struct process *only, i64 begin, i64 end) {
  i64 now = machine_now(), busy = waiting(gpu, only, begin, end < now ? end : now);
  for (i64 ms = begin / MS; ms * MS < end; ms++) {
    i64 from = begin > ms * MS ? begin : ms * MS, to = end < (ms + 1) * MS ? end : (ms + 1) * MS;
    uint64_t bucket = (only ? only->uses[gpu].buckets : machine.state->buckets[gpu])[ms % BUCKETS];
    if (bucket >> 32 == (uint32_t)ms) busy += (i64)(uint32_t)bucket * (to - from) / MS;
  }
  return busy < end - begin ? busy : end - begin;
}

i64 machine_busy_until(int gpu, i64 now) { // without what is queued
  return (i64)machine.state->busy_ns[gpu] + waiting(gpu, NULL, 0, now) - machine_busy(gpu, NULL, now, now + AHEAD);
}
