// Devices: which there are, what they say of themselves, and errors.
#define _GNU_SOURCE
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
const struct machine *machine;
struct process *self;
struct device devices[GPUS];
int device_count;
__thread int current;
static __thread cudaError_t last;
static int forked;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static volatile int started;

static void in_child(void) { forked = started; }
static int matches(const char *entry, const int *shown, int n) { // CUDA_VISIBLE_DEVICES: a number, or how a UUID begins
  char *end;
  if (!strncmp(entry, "GPU-", 4) || !strncmp(entry, "MIG-", 4)) {
    int hit = -1;
    for (int g = 0; g < machine->gpus; g++)
      if (!strncmp(machine->gpu[g].uuid, entry, strlen(entry))) {
        if (hit >= 0) return -1;
        hit = g;
      }
    return hit >= 0 && machine->gpu[hit].mig_mode ? -1 : hit;
  }
  long number = strtol(entry, &end, 10);
  return end == entry || number < 0 || number >= n ? -1 : shown[number];
}
static double speed(int g) {
  return machine->gpu[machine->gpu[g].parent < 0 ? g : machine->gpu[g].parent].flops_per_ns;
}
static void find_devices(void) {
  int shown[GPUS], n = 0;
  for (int g = 0; g < machine->gpus; g++) { // in the order of their addresses; of a GPU in MIG mode the first instance
    int parent = machine->gpu[g].parent;
    if (!machine->gpu[g].mig_mode && (parent < 0 || g == parent + 1)) shown[n++] = g;
  }
  const char *order = getenv("CUDA_DEVICE_ORDER"), *mask = getenv("CUDA_VISIBLE_DEVICES");
  for (int i = 1; i < n && !(order && !strcmp(order, "PCI_BUS_ID")); i++) // the fastest first
    for (int k = i; k > 0 && speed(shown[k]) > speed(shown[k - 1]); k--) {
      int g = shown[k];
      shown[k] = shown[k - 1];
      shown[k - 1] = g;
    }
  if (mask) {
    int chosen[GPUS], k = 0;
    char *copy = strdup(mask), *rest = copy, *entry;
    while ((entry = strsep(&rest, ",")) && k < GPUS) {
      int g = matches(entry + strspn(entry, " "), shown, n);
      if (g < 0) break; // CUDA ends the list here
      for (int i = 0; i < k; i++)
        if (chosen[i] == g) { // and shows nothing at all where one comes twice
          k = 0;
          g = -1;
          break;
        }
      if (g < 0) break;
      chosen[k++] = g;
    }
    free(copy);
    memcpy(shown, chosen, sizeof shown);
    n = k;
  }
  for (int i = 0; i < n; i++)
    if (machine->gpu[shown[i]].parent >= 0) { // a process sees one instance, and nothing else
      shown[0] = shown[i];
      n = 1;
    }
  for (int i = 0; i < n; i++) devices[i].gpu = shown[i];
  device_count = n;
}
// No cuDNN without a GPU: torch takes its own kernels, as after torch.backends.cudnn.enabled = False, and its own
// attention, which is cuDNN's on Hopper and Blackwell otherwise.
static void without_cudnn(void) {
  static int done;
  if (done) return;
  void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!torch) return;
  void *(*context)(void) = (void *(*)(void))dlsym(torch, "_ZN2at13globalContextEv");
  static const char *const switches[] = {"_ZN2at7Context19setUserEnabledCuDNNEb", "_ZN2at7Context14setSDPUseCuDNNEb"};
  for (size_t i = 0; context && i < sizeof switches / sizeof *switches; i++) {
    void (*enable)(void *, _Bool) = (void (*)(void *, _Bool))dlsym(torch, switches[i]);
    if (enable) enable(context(), 0);
  }
  done = 1;
}
static void start(void) {
  if ((machine = machine_open())) {
    self = machine_join();
    find_devices();
  }
  pthread_atfork(NULL, NULL, in_child);
  started = 1;
}
void begin(void) { pthread_once(&once, start); }
int begun(void) { return started; }
cudaError_t fail(cudaError_t error) {
  last = error;
  return error;
}
void activate(int device) { self->uses[devices[device].gpu].active = 1; }
cudaError_t usable(void) {
  begin();
  if (forked) return fail(cudaErrorInitializationError);
  if (!device_count) return fail(cudaErrorNoDevice);
  activate(current); // calls that need a context make it on the current device
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n) {
  begin();
  without_cudnn();
  *n = forked ? 0 : device_count;
  return forked ? fail(cudaErrorInitializationError) : device_count ? 0 : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *d) {
  begin();
  *d = current;
  return device_count ? 0 : fail(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int d) {
  begin();
  if (forked) return fail(cudaErrorInitializationError);
  if (d < 0 || d >= device_count) return fail(device_count ? cudaErrorInvalidDevice : cudaErrorNoDevice);
  current = d;
  return usable(); // since CUDA 12 this makes the context
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) {
  *can = a != b;
  return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *to, int size, int d) {
  begin();
  if (d < 0 || d >= device_count) return fail(cudaErrorInvalidDevice);
  snprintf(to, size, "%s", GPU(d)->pci);
  return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}

static int threads_per_sm(const struct gpu *g) {
  return g->major * 10 + g->minor == 75 ? 1024 : g->major == 8 && g->minor ? 1536 : g->major == 12 ? 1536 : 2048;
}
// A kilobyte of a multiprocessor's shared memory is the system's, but on Turing.
static int shared_of_block(const struct gpu *g) { return (g->shared_kib - (g->major >= 8)) << 10; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute,
                                   int d) { // of CUDA's programming guide, by compute capability
  begin();
  if (d < 0 || d >= device_count) return fail(cudaErrorInvalidDevice);
  const struct gpu *g = GPU(d);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = g->sms; break;
    case cudaDevAttrComputeCapabilityMajor: *value = g->major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = g->minor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = threads_per_sm(g); break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_of_block(g); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = g->shared_kib << 10; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrTextureAlignment: *value = 512; break;
    case cudaDevAttrClockRate:
      *value = 1000000;
      break; // torch.cuda._sleep counts in cycles: a cycle is a nanosecond here
    case cudaDevAttrL2CacheSize: *value = g->l2_mib << 20; break;
    case cudaDevAttrIntegrated:
    case cudaDevAttrPageableMemoryAccess: *value = 0; break;
    default: *value = 1;
  }
  return 0;
}
int uuid_bytes(int d, unsigned char *to) {
  if (d < 0 || d >= device_count) return cudaErrorInvalidDevice;
  const char *text = strchr(GPU(d)->uuid, '-');
  unsigned byte;
  int n = 0;
  while (text && *text && n < 16) {
    if (*text == '-')
      text++;
    else if (sscanf(text, "%2x", &byte) == 1) {
      to[n++] = byte;
      text += 2;
    } else
      break;
  }
  return 0;
}
// CUDA 13 calls the second version by the first one's name.
#if CUDART_VERSION >= 13000
#define PROPERTIES cudaGetDeviceProperties
#else
#define PROPERTIES cudaGetDeviceProperties_v2
#endif
cudaError_t PROPERTIES(struct cudaDeviceProp *p, int d) {
  begin();
  if (d < 0 || d >= device_count) return fail(cudaErrorInvalidDevice);
  const struct gpu *g = GPU(d);
  unsigned domain = 0, bus = 0, slot = 0;
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", g->name);
  uuid_bytes(d, (unsigned char *)p->uuid.bytes);
  sscanf(g->pci, "%x:%x:%x", &domain, &bus, &slot);
  p->pciDomainID = domain;
  p->pciBusID = bus;
  p->pciDeviceID = slot;
  p->totalGlobalMem = g->memory - g->reserved;
  p->major = g->major;
  p->minor = g->minor;
  p->multiProcessorCount = g->sms;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = threads_per_sm(g);
  p->warpSize = 32;
  p->maxBlocksPerMultiProcessor = 32;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = shared_of_block(g);
  p->sharedMemPerMultiprocessor = g->shared_kib << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = g->l2_mib << 20;
  p->memoryBusWidth = 5120;
  p->textureAlignment = 512;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = p->managedMemory = 1;
  p->asyncEngineCount = 3;
#if CUDART_VERSION < 13000
  p->clockRate = 1000000;
  p->memoryClockRate = 2619000;
#endif
  return 0;
}
cudaError_t cudaDriverGetVersion(int *v) {
  begin();
  *v = device_count ? CUDART_VERSION : 0;
  return 0;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = CUDART_VERSION;
  return 0;
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last;
  last = 0;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
static const struct {
  cudaError_t error;
  const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
};
static int named(cudaError_t error) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].error == error) return i;
  return -1;
}
const char *cudaGetErrorName(cudaError_t error) {
  int i = named(error);
  return i < 0 ? "cudaErrorUnknown" : errors[i].name;
}
const char *cudaGetErrorString(cudaError_t error) {
  int i = named(error);
  return i < 0 ? "unknown error" : errors[i].text;
}
