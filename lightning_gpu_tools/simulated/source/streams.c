// Streams and events: when each operation ends. The host's clock goes on; work takes the time that it would take.
#define _GNU_SOURCE
#include "runtime.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct stream *streams;
long simulated_cuda_waits[4];
static struct stream *defaults[GPUS];

// By default the driver lets a waiting thread spin where there are more cores than contexts (cudaDeviceScheduleAuto).
static void wait_until(i64 at, int asleep) {
  static int never_spins = -1;
  if (never_spins < 0) never_spins = getenv("SIMULATED_CUDA_WAITS_ASLEEP") != NULL;
  struct timespec t = {at / 1000000000LL, at % 1000000000LL};
  if (!asleep && !never_spins)
    while (machine_now() < at);
  else if (machine_now() < at)
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR);
}
static void wait_shortly(int asleep) { wait_until(machine_now() + 50000, asleep); }

struct stream *stream_of(cudaStream_t s) {
  if ((size_t)s > 2) return (struct stream *)s;
  if (!defaults[current]) { // the legacy one; the streams of torch do not wait for it
    struct stream *n = calloc(1, sizeof *n);
    n->device = current;
    pthread_mutex_lock(&lock);
    n->next = streams;
    streams = n;
    defaults[current] = n;
    pthread_mutex_unlock(&lock);
  }
  return defaults[current];
}
void work(struct stream *s, i64 ns, int busy, i64 queued) { // its end becomes that of the stream
  i64 start = s->until > queued ? s->until : queued;
  s->until = start + ns;
  s->ends[s->count++ % DEPTH] = s->until;
  activate(s->device);
  if (busy) machine_book(self, devices[s->device].gpu, start, s->until);
  if (s->until > devices[s->device].until) devices[s->device].until = s->until;
}
static void finish(struct effect *effect) {
  if (effect) {
    effect->run(effect);
    if (!effect->kept) free(effect);
  }
}
static struct capture *captured(struct event *v) {
  return v->capture && v->capture->status != cudaStreamCaptureStatusNone ? v->capture : NULL;
}
void append(struct stream *s, struct op op) {
  struct op *n = malloc(sizeof *n);
  *n = op;
  n->next = NULL;
  if (s->last)
    s->last->next = n;
  else
    s->first = n;
  s->last = n;
  s->waiting++;
}
int settle(struct stream *s) { // returns whether the stream's end is known
  for (struct op *o; (o = s->first);) {
    if (o->kind == WORK) {
      work(s, o->ns, o->busy, o->queued);
      finish(o->effect);
    } else if (o->kind == RECORD) {
      o->event->at = s->until > o->queued ? s->until : o->queued;
      if (o->generation > o->event->done) o->event->done = o->generation;
    } else if (o->kind == WAIT) {
      if (o->event && o->event->done < o->generation) return 0;
      i64 at = o->event ? o->event->at : o->ns;
      if (at > s->until) s->until = at;
    } else if (!arrive(s, o))
      return 0;
    if (!(s->first = o->next)) s->last = NULL;
    s->waiting--;
    free(o);
  }
  return 1;
}
// Twice: one stream may wait for a later one.
void settle_all(void) {
  for (int again = 2; again--;)
    for (struct stream *s = streams; s; s = s->next) settle(s);
}

void capture_op(struct stream *s, struct op op) { // in the graph that is being captured
  struct graph *g = s->capture->graph;
  struct op *n = malloc(sizeof *n);
  *n = op;
  n->next = NULL;
  if (g->last)
    g->last->next = n;
  else
    g->first = n;
  g->last = n;
  g->nodes++;
  if (op.effect) op.effect->kept = 1;
}
cudaError_t enqueue(struct stream *s, i64 ns, int busy, struct effect *effect) {
  struct op op = {.kind = WORK, .busy = busy, .ns = ns, .effect = effect};
  for (;;) {
    pthread_mutex_lock(&lock);
    if (s->capture) {
      int valid = s->capture->status == cudaStreamCaptureStatusActive;
      if (valid)
        capture_op(s, op);
      else
        free(effect);
      pthread_mutex_unlock(&lock);
      return valid ? 0 : fail(cudaErrorStreamCaptureInvalidated);
    }
    op.queued = machine_now();
    if (!settle(s)) {
      int taken = s->waiting < DEPTH;
      if (taken) append(s, op);
      pthread_mutex_unlock(&lock);
      if (taken) return 0;
      wait_shortly(0);
      continue;
    }
    i64 oldest = s->count >= DEPTH ? s->ends[s->count % DEPTH] : 0;
    if (oldest > op.queued) {
      pthread_mutex_unlock(&lock);
      wait_until(oldest, 0);
      continue;
    }
    work(s, ns, busy, op.queued);
    finish(effect);
    pthread_mutex_unlock(&lock);
    return 0;
  }
}
cudaError_t not_while_capturing(struct stream *s) {
  struct capture *found = s ? s->capture : NULL;
  for (struct stream *one = s ? NULL : streams; one && !found; one = one->next) found = one->capture;
  if (!found) return 0;
  found->status = cudaStreamCaptureStatusInvalidated;
  return fail(cudaErrorStreamCaptureUnsupported);
}
cudaError_t wait_stream(struct stream *s) {
  for (;;) {
    pthread_mutex_lock(&lock);
    settle_all();
    int known = !s->first;
    i64 end = s->until;
    pthread_mutex_unlock(&lock);
    if (!known) {
      wait_shortly(0);
      continue;
    }
    wait_until(end, 0);
    return 0;
  }
}
cudaError_t wait_device(int device) {
  for (struct stream *s = streams; s; s = s->next)
    if (s->device == device) wait_stream(s);
  wait_until(devices[device].until, 0);
  return 0;
}
cudaError_t cudaDeviceSynchronize(void) {
  cudaError_t error = usable();
  if (error || (error = not_while_capturing(NULL))) return error;
  simulated_cuda_waits[0]++;
  return wait_device(current);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  cudaError_t error = usable();
  if (error) return error;
  struct stream *n = calloc(1, sizeof *n);
  n->device = current;
  n->flags = flags;
  n->priority = priority;
  pthread_mutex_lock(&lock);
  n->next = streams;
  streams = n;
  pthread_mutex_unlock(&lock);
  *s = (cudaStream_t)n;
  return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
  return cudaStreamCreateWithPriority(s, flags, 0);
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
  *priority = stream_of(s)->priority;
  return 0;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
  cudaError_t error = usable();
  struct stream *t = stream_of(s);
  if (error || (error = not_while_capturing(t))) return error;
  pthread_mutex_lock(&lock);
  settle_all();
  int ready = !t->first && t->until <= machine_now();
  pthread_mutex_unlock(&lock);
  return ready ? 0 : fail(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  cudaError_t error = usable();
  struct stream *t = stream_of(s);
  if (error || (error = not_while_capturing(t))) return error;
  simulated_cuda_waits[1]++;
  return wait_stream(t);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  cudaError_t error = usable();
  struct stream *t = stream_of(s);
  struct event *v = (struct event *)e;
  if (error) return error;
  pthread_mutex_lock(&lock);
  if (captured(v)) { // the stream joins the capture that the event belongs to
    if (t->capture && t->capture != v->capture)
      error = cudaErrorStreamCaptureIsolation;
    else
      t->capture = v->capture;
  } else if (t->capture && v->recorded && !(flags & cudaEventWaitExternal)) {
    error = cudaErrorStreamCaptureIsolation;
    t->capture->status = cudaStreamCaptureStatusInvalidated;
  } else if (!t->capture) {
    settle_all();
    if (v->done < v->wanted)
      v->awaited = 1, append(t, (struct op){.kind = WAIT, .generation = v->wanted, .event = v});
    else if (t->first && v->recorded)
      append(t, (struct op){.kind = WAIT, .ns = v->at}); // the event may be gone by then
    else if (v->recorded && v->at > t->until)
      t->until = v->at;
  }
  pthread_mutex_unlock(&lock);
  return error ? fail(error) : 0;
}
// They run at once, not when the stream comes to them.
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned flags) {
  call(s, 0, data);
  return 0;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) {
  if (!stream_of(s)->capture) call(data);
  return 0;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
  cudaError_t error = usable();
  if (error) return error;
  struct event *n = calloc(1, sizeof *n);
  n->flags = flags;
  n->device = current;
  *e = (cudaEvent_t)n;
  return 0;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  struct event *v = (struct event *)e;
  pthread_mutex_lock(&lock);
  int idle = v->done == v->wanted && !v->awaited;
  pthread_mutex_unlock(&lock);
  if (idle) free(v);
  return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  cudaError_t error = usable();
  struct event *v = (struct event *)e;
  struct stream *t = stream_of(s);
  if (error) return error;
  if (v->device != t->device) return fail(cudaErrorInvalidResourceHandle);
  pthread_mutex_lock(&lock);
  if (t->capture) {
    if (flags & cudaEventRecordExternal)
      capture_op(t, (struct op){.kind = RECORD, .event = v});
    else
      v->capture = t->capture;
  } else {
    i64 now = machine_now();
    v->recorded = 1;
    v->wanted++;
    v->capture = NULL;
    if (settle(t)) {
      v->at = t->until > now ? t->until : now;
      v->done = v->wanted;
    } else
      append(t, (struct op){.kind = RECORD, .queued = now, .generation = v->wanted, .event = v});
  }
  pthread_mutex_unlock(&lock);
  return 0;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
static int known(struct event *v) {
  pthread_mutex_lock(&lock);
  if (v->done < v->wanted) settle_all();
  int is = v->done == v->wanted;
  pthread_mutex_unlock(&lock);
  return is;
}
static int passed(struct event *v) { return !v->recorded || (known(v) && v->at <= machine_now()); }
cudaError_t cudaEventQuery(cudaEvent_t e) {
  struct event *v = (struct event *)e;
  if (captured(v)) {
    v->capture->status = cudaStreamCaptureStatusInvalidated;
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  return passed(v) ? 0 : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  struct event *v = (struct event *)e;
  int asleep = v->flags & cudaEventBlockingSync;
  if (captured(v)) {
    v->capture->status = cudaStreamCaptureStatusInvalidated;
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  simulated_cuda_waits[2]++;
  while (v->recorded && !known(v)) wait_shortly(asleep);
  if (v->recorded) wait_until(v->at, asleep);
  return 0;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  struct event *x = (struct event *)a, *y = (struct event *)b;
  if (!x->recorded || !y->recorded || x->device != y->device || (x->flags | y->flags) & cudaEventDisableTiming)
    return fail(cudaErrorInvalidResourceHandle);
  if (!passed(x) || !passed(y)) return fail(cudaErrorNotReady);
  *ms = (y->at - x->at) / 1e6f;
  return 0;
}
cudaError_t cudaEventElapsedTime_v2(float *ms, cudaEvent_t a, cudaEvent_t b) { return cudaEventElapsedTime(ms, a, b); }

// CUDA graphs: what a capturing stream, and those that join it, are given. A replay does it in the same order, one
// after the other.
static unsigned long long captures;
static struct capture *capturing(cudaStream_t s) { return stream_of(s)->capture; }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  cudaError_t error = usable();
  struct stream *t = stream_of(s);
  if (error) return error;
  if (!s || t->capture) return fail(t->capture ? cudaErrorIllegalState : cudaErrorStreamCaptureUnsupported);
  struct capture *c = calloc(1, sizeof *c);
  c->status = cudaStreamCaptureStatusActive;
  c->graph = calloc(1, sizeof *c->graph);
  pthread_mutex_lock(&lock);
  c->id = ++captures;
  t->capture = c;
  pthread_mutex_unlock(&lock);
  return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
  struct capture *c = capturing(s);
  if (!c) return fail(cudaErrorIllegalState);
  int valid = c->status == cudaStreamCaptureStatusActive;
  pthread_mutex_lock(&lock);
  for (struct stream *one = streams; one; one = one->next)
    if (one->capture == c) one->capture = NULL;
  pthread_mutex_unlock(&lock);
  *graph = valid ? (cudaGraph_t)c->graph : NULL;
  c->status = cudaStreamCaptureStatusNone; // and it stays: events may still point to it
  return valid ? 0 : fail(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  begin();
  *status = device_count && capturing(s) ? capturing(s)->status : cudaStreamCaptureStatusNone;
  return 0;
}
static cudaError_t capture_info(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                cudaGraph_t *graph) {
  cudaStreamIsCapturing(s, status);
  if (*status == cudaStreamCaptureStatusNone) return 0;
  if (id) *id = capturing(s)->id;
  if (graph) *graph = (cudaGraph_t)capturing(s)->graph;
  return 0;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *n) {
  if (n) *n = 0;
  return capture_info(s, status, id, graph);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                        cudaGraph_t *graph, const cudaGraphNode_t **nodes, size_t *n) {
  if (n) *n = 0;
  return capture_info(s, status, id, graph);
}
#endif
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) {
  *n = ((struct graph *)graph)->nodes;
  return 0;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  *exec = (cudaGraphExec_t)graph;
  return 0;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(exec, graph, flags);
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *data, cudaHostFn_t destroy, unsigned references,
                                 unsigned flags) {
  static int one;
  *object = (cudaUserObject_t)&one;
  return 0;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
  cudaError_t error = usable();
  struct stream *t = stream_of(s);
  if (error) return error;
  pthread_mutex_lock(&lock);
  i64 now = machine_now();
  settle(t);
  for (struct op *o = ((struct graph *)exec)->first; o; o = o->next) {
    struct op again = *o;
    again.queued = now;
    if (o->kind == RECORD) {
      o->event->recorded = 1;
      again.generation = ++o->event->wanted;
    } else if (o->kind == COLLECTIVE)
      collective_copied(&again);
    append(t, again);
  }
  settle(t);
  pthread_mutex_unlock(&lock);
  return 0;
}
