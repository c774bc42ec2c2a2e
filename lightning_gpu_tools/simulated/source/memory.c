// Memory: the host's, of which untouched pages cost nothing; sizes count as the GPU's.
#define _GNU_SOURCE
#include "runtime.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRAIN (2UL << 20) // cudaMalloc maps memory in pieces of 2 MiB
enum where { ON_DEVICE, ON_HOST };
struct block {
  char *begin;
  size_t size;
  int device;
  enum where where;
  struct block *next;
};
static struct block *blocks;

static struct block *find(const void *p) {
  for (struct block *b = blocks; b; b = b->next)
    if ((char *)p >= b->begin && (char *)p < b->begin + b->size) return b;
  return NULL;
}
static void list(char *begin, size_t size, int device, enum where where) {
  struct block *b = malloc(sizeof *b);
  *b = (struct block){begin, size, device, where, blocks};
  blocks = b;
}
static int unlist(void *p, struct block *was) { // with the lock
  for (struct block **b = &blocks; *b; b = &(*b)->next)
    if ((*b)->begin == p) {
      struct block *gone = *b;
      *was = *gone;
      *b = gone->next;
      free(gone);
      return 1;
    }
  return 0;
}
static size_t *bytes_of(int device) { return &self->uses[devices[device].gpu].bytes; }
static int fits(int device, size_t size) { return machine_used(devices[device].gpu) + size <= GPU(device)->memory; }
static int reserve(int device, size_t size) { // with the lock
  if (!fits(device, size)) return 0;
  *bytes_of(device) += size;
  return 1;
}
static cudaError_t take(void **p, size_t size, enum where where) {
  cudaError_t error = usable();
  if (error) return error;
  *p = NULL;
  if (!size) return 0;
  size = (size + GRAIN - 1) / GRAIN * GRAIN;
  pthread_mutex_lock(&lock);
  int full = where == ON_DEVICE && !reserve(current, size);
  char *m = full ? MAP_FAILED
                 : mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m != MAP_FAILED) {
    list(m, size, current, where);
    *p = m;
  }
  pthread_mutex_unlock(&lock);
  return m == MAP_FAILED ? fail(cudaErrorMemoryAllocation) : 0;
}
static cudaError_t give(void *p) {
  struct block b;
  if (!p) return 0;
  pthread_mutex_lock(&lock);
  int found = unlist(p, &b);
  if (found && b.where == ON_DEVICE) *bytes_of(b.device) -= b.size;
  pthread_mutex_unlock(&lock);
  if (!found) return fail(cudaErrorInvalidValue);
  munmap(b.begin, b.size);
  return 0;
}

cudaError_t cudaMalloc(void **p, size_t size) { return take(p, size, ON_DEVICE); }
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { return take(p, size, ON_HOST); }
cudaError_t cudaFree(void *p) { // waits for the device, as the documentation says
  cudaError_t error = usable();
  if (error) return error;
  if (!p) return 0; // the usual way to start CUDA
  return (error = wait_device(current)) ? error : give(p);
}
cudaError_t cudaFreeHost(void *p) { return give(p); }
cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) {
  cudaError_t error = usable();
  if (error) return error;
  pthread_mutex_lock(&lock);
  list(p, size, current, ON_HOST);
  pthread_mutex_unlock(&lock);
  return 0;
}
cudaError_t cudaHostUnregister(void *p) {
  struct block b;
  pthread_mutex_lock(&lock);
  unlist(p, &b);
  pthread_mutex_unlock(&lock);
  return 0;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  cudaError_t error = usable();
  if (error) return error;
  *total = GPU(current)->memory - GPU(current)->reserved;
  *free = GPU(current)->memory - machine_used(devices[current].gpu);
  return 0;
}
static int place(const void *p, int *pinned) { // the device, or -1 for the host
  pthread_mutex_lock(&lock);
  struct block *b = find(p);
  int device = b && b->where != ON_HOST ? b->device : -1;
  *pinned = b && b->where == ON_HOST;
  pthread_mutex_unlock(&lock);
  return device;
}
int on_device(const void *p) {
  int pinned;
  return place(p, &pinned) >= 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int pinned, device = place(p, &pinned);
  if (begun() && device_count) activate(current); // as torch says of it in isPinnedPtr
  memset(a, 0, sizeof *a);
  a->type = device >= 0 ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = device >= 0 ? device : 0;
  a->devicePointer = device >= 0 || pinned ? (void *)p : NULL;
  a->hostPointer = device >= 0 ? NULL : (void *)p;
  return 0;
}

struct moved {
  struct effect effect;
  char *to;
  const char *from;
  size_t size, rows, to_pitch, from_pitch;
  int value;
};
static void move(struct effect *effect) {
  struct moved *m = (struct moved *)effect;
  for (size_t row = 0; row < m->rows; row++) {
    if (m->from)
      memmove(m->to + row * m->to_pitch, m->from + row * m->from_pitch, m->size);
    else
      memset(m->to, m->value, m->size);
  }
}
static struct effect *moved(struct moved m) {
  struct moved *n = malloc(sizeof *n);
  *n = m;
  n->effect = (struct effect){move};
  return &n->effect;
}
struct effect *copy_effect(void *to, const void *from, size_t size) {
  return moved((struct moved){.to = to, .from = from, .size = size, .rows = 1});
}
struct effect *set_effect(void *to, int value, size_t size) {
  return moved((struct moved){.to = to, .value = value, .size = size, .rows = 1});
}
static cudaError_t copy(struct moved m, struct stream *s, int wait) {
  cudaError_t error = usable();
  if (error) return error;
  int to_pinned, from_pinned, to = place(m.to, &to_pinned), from = place(m.from, &from_pinned);
  size_t size = m.size * m.rows;
  double memory_rate = GPU(s->device)->bytes_per_ns / 2; // read, and written
  if (to >= 0 && from >= 0) {                            // by a kernel, or over NVLink
    error = enqueue(s, 2000 + size / (to == from ? memory_rate : machine->nccl_per_ns), 1, moved(m));
    if (!error && wait) {
      simulated_cuda_waits[3]++;
      error = wait_stream(s);
    }
    return error;
  }
  int pinned = to >= 0 ? from_pinned : from >= 0 ? to_pinned : 1;
  i64 ns = 3000 + size / (pinned ? machine->pinned_per_ns : machine->pageable_per_ns);
  if (s->capture || (pinned && !wait)) return enqueue(s, ns, 0, moved(m));
  // Pageable memory: the host waits for the stream first, and then for the copy.
  simulated_cuda_waits[3]++;
  if ((error = wait_stream(s)) || (error = enqueue(s, ns, 0, NULL)) || (error = wait_stream(s))) return error;
  move(&m.effect);
  return 0;
}
static struct moved flat(void *to, const void *from, size_t size) {
  return (struct moved){.to = to, .from = from, .size = size, .rows = 1};
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  cudaError_t error = usable();
  return error ? error : size ? copy(flat(to, from, size), stream_of(0), 1) : 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s) {
  cudaError_t error = usable();
  return error ? error : size ? copy(flat(to, from, size), stream_of(s), 0) : 0;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t s) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, s);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
  cudaError_t error = usable();
  return error ? error
               : copy((struct moved){.to = to,
                                     .from = from,
                                     .size = width,
                                     .rows = height,
                                     .to_pitch = to_pitch,
                                     .from_pitch = from_pitch},
                      stream_of(s), 0);
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t s) {
  cudaError_t error = usable();
  if (error) return error;
  struct stream *t = stream_of(s);
  i64 ns = machine->kernel_ns + size / GPU(t->device)->bytes_per_ns;
  return enqueue(t, ns, 1,
                 value || size < (64UL << 20) ? set_effect(p, value, size)
                                              : NULL); // zeros would cost the host the pages that it does not have
}
cudaError_t cudaMemset(void *p, int value, size_t size) { return cudaMemsetAsync(p, value, size, 0); }

// The driver's calls for memory that is mapped piece by piece, on which torch's expandable segments stand.
struct piece {
  size_t size;
  int device;
};
struct properties {
  int type, handles, location_type, device;
}; // how CUmemAllocationProp begins
int cuMemGetAllocationGranularity(size_t *size, const struct properties *p, int option) {
  *size = GRAIN;
  return 0;
}
int cuMemAddressReserve(void **p, size_t size, size_t alignment, void *at, unsigned long long flags) {
  char *m = mmap(at, size + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return 2;
  *p = (void *)(((size_t)m + GRAIN - 1) / GRAIN * GRAIN);
  return 0; // the rest stays: it costs addresses only
}
int cuMemAddressFree(void *p, size_t size) {
  munmap(p, size);
  return 0;
}
int cuMemCreate(struct piece **piece, size_t size, const struct properties *p, unsigned long long flags) {
  int device = p->device, full;
  if (usable()) return 719;
  pthread_mutex_lock(&lock);
  activate(device);
  full = !reserve(device, size);
  pthread_mutex_unlock(&lock);
  if (full) return 2; // CUDA_ERROR_OUT_OF_MEMORY
  *piece = malloc(sizeof **piece);
  **piece = (struct piece){size, device};
  return 0;
}
int cuMemRelease(struct piece *piece) {
  pthread_mutex_lock(&lock);
  *bytes_of(piece->device) -= piece->size;
  pthread_mutex_unlock(&lock);
  free(piece);
  return 0;
}
int cuMemMap(char *at, size_t size, size_t offset, struct piece *piece, unsigned long long flags) {
  pthread_mutex_lock(&lock);
  list(at, size, piece->device, ON_DEVICE);
  pthread_mutex_unlock(&lock);
  return 0;
}
int cuMemSetAccess(char *at, size_t size, const void *access, size_t n) {
  return mprotect(at, size, PROT_READ | PROT_WRITE) ? 1 : 0;
}
int cuMemUnmap(char *at, size_t size) {
  struct block b;
  for (char *p = at; p < at + size; p += GRAIN) {
    pthread_mutex_lock(&lock);
    unlist(p, &b);
    pthread_mutex_unlock(&lock);
  }
  return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED;
}
