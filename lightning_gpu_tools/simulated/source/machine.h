// The simulated machine: GPUs out of a text file, and what all of its processes do on them, in one shared file.
// The runtime writes it, and the driver's management library (nvml.c) reads it.
#pragma once
#include <stdint.h>
#include <stddef.h>
#define GPUS 16       // with MIG instances, which have an entry of their own
#define PROCESSES 64  // that use a GPU at the same time
#define BUCKETS 32768 // of a millisecond: 20 s that the driver remembers, and what is queued for the next 12
typedef int64_t i64;

struct gpu {
  char name[96], uuid[96], pci[32];
  size_t memory, reserved, context; // bytes; a context is what a process costs that has started CUDA there
  int major, minor, sms, shared_kib, l2_mib, nvlink, parent, mig_mode;
  double bytes_per_ns, flops_per_ns, tf32_per_ns, half_per_ns, idle_w, limit_w;
};
// How long a GPU was busy in each millisecond since the machine's boot: the millisecond in the upper half, ns in the lower.
typedef volatile uint64_t ring[BUCKETS];
struct use {
  int active;
  size_t bytes;      // without the context
  i64 waiting_since; // in a collective whose end is not known yet: busy since then, not booked; 0: none
  ring buckets;
};
struct process {
  volatile int pid;
  i64 birth;
  struct use uses[GPUS];
};
struct state { // all zero at the beginning. Python writes the first array.
  volatile uint64_t others[GPUS];  // bytes that others hold
  volatile uint64_t busy_ns[GPUS]; // all time in which work was ever booked, by any process
  ring buckets[GPUS];              // of all processes
  struct process processes[PROCESSES];
};
struct machine {
  int gpus;
  struct gpu gpu[GPUS];
  double kernel_ns, pinned_per_ns, pageable_per_ns, nccl_per_ns;
  struct state *state;
};
const struct machine *machine_open(void); // NULL without a machine in $SIMULATED_CUDA
i64 machine_now(void);                    // ns since the boot
struct process *machine_join(void);       // this process's place
int machine_alive(const struct process *process);
size_t machine_used(int gpu); // bytes, with contexts, others and what the driver keeps
void machine_book(struct process *process, int gpu, i64 begin, i64 end);
i64 machine_busy(int gpu, const struct process *only, i64 begin, i64 end); // ns; of one process, or of all (NULL)
i64 machine_busy_until(int gpu, i64 now);                                  // ns, of all processes, since the beginning
