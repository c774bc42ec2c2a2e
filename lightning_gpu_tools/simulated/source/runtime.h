// What the parts of the runtime share. One lock guards all of it but what is said to be a thread's own.
#pragma once
#include "machine.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#undef cudaGetDeviceProperties
#define DEPTH                                                                                                          \
  1024 // operations that a stream's queue takes before the host has to wait; our default, near what hardware does

// What an operation does to memory, in the order of its stream. Kernels do nothing but the few in kernels.c.
struct effect {
  void (*run)(struct effect *);
  int kept;
}; // kept: by a graph, which does it again
enum kind { WORK, RECORD, WAIT, COLLECTIVE };
struct op {
  enum kind kind;
  int busy;       // whether utilization counts it: kernels, not copies
  i64 ns, queued; // how long it takes; when the host queued it
  i64 booked;     // COLLECTIVE: until when it has kept the GPU busy, waiting for other ranks
  i64 generation; // RECORD and WAIT: which record of the event
  struct event *event;
  struct collective *collective;
  struct effect *effect;
  struct op *next;
};
struct graph {
  struct op *first, *last;
  int nodes;
};
struct capture {
  enum cudaStreamCaptureStatus status;
  unsigned long long id;
  struct graph *graph;
};
struct stream {
  int device, priority;
  unsigned flags;
  i64 until, ends[DEPTH];
  uint64_t count; // when all is done whose time is known; the ends of the last operations
  struct op *first, *last;
  int waiting; // behind a collective, whose end is not known until all ranks have come
  struct capture *capture;
  struct stream *next;
};
struct event {
  int device, recorded, awaited;
  unsigned flags; // awaited: an operation in a queue may point to it
  i64 at, wanted,
      done; // when its last record came; the numbers of its last record, and of the last whose time is known
  struct capture *capture;
};
struct device {
  int gpu;
  i64 until;
}; // its place in the machine

extern pthread_mutex_t lock;
extern const struct machine *machine;
extern struct process *self;
extern struct device devices[GPUS];
extern int device_count;
extern struct stream *streams;
extern __thread int current;         // device of this thread
extern long simulated_cuda_waits[4]; // of the host: for a device, a stream, an event, a copy
#define GPU(d) (&machine->gpu[devices[d].gpu])

void begin(void); // starts CUDA in this process, once
int begun(void);
cudaError_t fail(cudaError_t error); // keeps it for cudaGetLastError
cudaError_t usable(void);            // an error if CUDA cannot be used
void activate(int device); // makes the context that memory and work need

struct stream *stream_of(cudaStream_t stream);
cudaError_t enqueue(struct stream *s, i64 ns, int busy,
                    struct effect *effect); // an operation; the host waits if the queue is full
void settle_all(void);                      // with the lock: works off what has become known
int settle(struct stream *s);
void append(struct stream *s, struct op op);
void capture_op(struct stream *s, struct op op); // in the graph that is being captured
void work(struct stream *s, i64 ns, int busy, i64 queued);
cudaError_t wait_stream(struct stream *s);
cudaError_t wait_device(int device);
cudaError_t not_while_capturing(struct stream *s); // an error, and the capture is void; s = NULL: any stream

int on_device(const void *p);
struct effect *copy_effect(void *to, const void *from, size_t size);
struct effect *set_effect(void *to, int value, size_t size);
int arrive(struct stream *s, struct op *op); // at a collective: whether all ranks have
void collective_copied(struct op *op);
