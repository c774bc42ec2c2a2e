// Kernels: they take time on their stream and do nothing, but for the few whose results decide what the host does next.
#define _GNU_SOURCE
#include "runtime.h"
#include "computed.h"
#include <stdlib.h>
#include <string.h>

#define KERNELS (1 << 19) // places for names; torch 2.15 has some 100,000
// The architectures, such as 86, for which a source file of torch was compiled.
struct code {
  int architectures[16], count;
};
static struct kernel {
  const void *function;
  const struct code *code;
  const char *name;
  compute_t *compute;
  int known;
} *kernels;
static struct kernel *place(const void *function) {
  size_t i = ((size_t)function >> 4) * 0x9E3779B97F4A7C15ULL >> 45;
  while (kernels[i].function && kernels[i].function != function) i = (i + 1) % KERNELS;
  return &kernels[i];
}
static __thread struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed[8];
static __thread int pushes;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *s) {
  if (pushes < 8) {
    pushed[pushes].grid = grid;
    pushed[pushes].block = block;
    pushed[pushes].shared = shared;
    pushed[pushes++].stream = s;
  }
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s) {
  pushes--;
  *grid = pushed[pushes].grid;
  *block = pushed[pushes].block;
  *shared = pushed[pushes].shared;
  *(cudaStream_t *)s = pushed[pushes].stream;
  return 0;
}
// Machine code comes in a fat binary: a header, and entries with a header each, one per architecture.
void **__cudaRegisterFatBinary(void *binary) {
  struct {
    int magic, version;
    const char *data;
  } *wrapper = binary;
  struct code *code = calloc(1, sizeof *code);
  const char *data = wrapper->data;
  if (wrapper->magic != 0x466243b1 || *(unsigned *)data != 0xba55ed50) return (void **)code;
  const char *end = data + *(unsigned short *)(data + 6) + *(size_t *)(data + 8);
  for (const char *entry = data + *(unsigned short *)(data + 6); entry < end && code->count < 16;) {
    if (*(unsigned short *)entry == 2) code->architectures[code->count++] = *(int *)(entry + 28); // 2: no PTX
    entry += *(unsigned *)(entry + 4) + *(size_t *)(entry + 8);
  }
  return (void **)code;
}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name, int limit, void *a,
                            void *b, void *c, void *d,
                            int *e) { // libraries register while they are loaded, one after the other
  if (!kernels) kernels = calloc(KERNELS, sizeof *kernels);
  struct kernel *k = place(function);
  k->function = function;
  k->name = name;
  k->code = (const struct code *)handle;
}
// The newest code that runs on a GPU: an architecture's runs on later ones of the same major number. cub chooses by it.
static int version_of(const struct code *code, const struct gpu *gpu) {
  int own = gpu->major * 10 + gpu->minor, best = 0;
  for (int i = 0; code && i < code->count; i++) {
    int architecture = code->architectures[i];
    if (architecture / 10 == gpu->major && architecture <= own && architecture > best) best = architecture;
  }
  return best ? best : own;
}
static cudaError_t launch(const void *function, dim3 grid, dim3 block, void **arguments, cudaStream_t s) {
  cudaError_t error = usable();
  if (error) return error;
  struct stream *t = stream_of(s);
  struct kernel *k = place(function);
  double threads = (double)grid.x * grid.y * grid.z * block.x * block.y * block.z;
  if (!k->known && k->name) {
    k->compute = compute_of(k->name);
    k->known = 1;
  }
  struct effect *effect = NULL;
  double ns = threads * 32 / GPU(t->device)->bytes_per_ns; // a thread reads and writes some 32 bytes: our default
  if (ns < machine->kernel_ns) ns = machine->kernel_ns;
  if (k->compute) effect = k->compute(k->name, arguments, grid.y, &ns);
  return enqueue(t, ns, 1, effect);
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return launch(f, grid, block, arguments, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **arguments) {
  return launch(f, c->gridDim, c->blockDim, arguments, c->stream);
}
#if CUDART_VERSION >= 13000
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (cudaKernel_t)f;
  return 0;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return launch(k, grid, block, arguments, s);
}
#endif
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  begin();
  memset(a, 0, sizeof *a);
  if (!device_count) return fail(cudaErrorNoDevice);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = version_of(place(f)->code, GPU(current));
  a->maxDynamicSharedSizeBytes = (GPU(current)->shared_kib - 1) << 10;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared,
                                                                   unsigned flags) {
  *n = block ? 2048 / block : 1;
  if (*n > 16) *n = 16;
  return 0;
}
// Code that is compiled at run time, by Triton or NVRTC, comes through the driver: of its kernels only the names are kept.
int cuModuleLoadDataEx(void **module, const void *code, unsigned n, int *options, void **values) {
  static int one;
  *module = &one;
  return usable();
}
int cuModuleLoadData(void **module, const void *code) { return cuModuleLoadDataEx(module, code, 0, NULL, NULL); }
int cuModuleLoad(void **module, const char *path) { return cuModuleLoadDataEx(module, path, 0, NULL, NULL); }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  char *own = strdup(name);
  pthread_mutex_lock(&lock);
  __cudaRegisterFunction(NULL, own, NULL, own, 0, NULL, NULL, NULL, NULL, NULL);
  pthread_mutex_unlock(&lock);
  *function = own;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; // threads of a block; registers, our default
  return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, cudaStream_t s, void **arguments, void **extra) {
  return launch(function, (dim3){x, y, z}, (dim3){bx, by, bz}, arguments, s);
}
int cuLaunchCooperativeKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared, cudaStream_t s, void **arguments) {
  return launch(function, (dim3){x, y, z}, (dim3){bx, by, bz}, arguments, s);
}
// The driver's structure has the grid, the blocks and the stream in the same places as the runtime's.
int cuLaunchKernelEx(const cudaLaunchConfig_t *c, void *function, void **arguments, void **extra) {
  return launch(function, c->gridDim, c->blockDim, arguments, c->stream);
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *function, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, function, block, shared, 0);
}
