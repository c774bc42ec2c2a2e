// The driver's library, libcuda.so.1, as which the whole runtime is loaded: contexts, and what only programs without
// kernels ask. Memory that is mapped in pieces is in memory.c, code that is compiled at run time in kernels.c. Other
// functions answer "not supported".
#define _GNU_SOURCE
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, NOT_SUPPORTED = 801, DEVICE_POINTER = 3 };
int uuid_bytes(int device, unsigned char *to);
int cuInit(unsigned flags) {
  int n;
  return cudaGetDeviceCount(&n);
}
int cuDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return 0;
}
int cuDeviceGetCount(int *n) {
  if (!begun()) return NOT_INITIALIZED;
  *n = device_count;
  return 0;
}
int cuDeviceGet(int *device, int ordinal) {
  if (!begun()) return NOT_INITIALIZED;
  *device = ordinal;
  return ordinal < 0 || ordinal >= device_count ? INVALID_DEVICE : 0;
}
int cuDeviceGetUuid(unsigned char *uuid, int device) { return begun() ? uuid_bytes(device, uuid) : NOT_INITIALIZED; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDeviceGetAttribute(int *value, int attribute,
                         int device) { // above 102, memory that is mapped in pieces, are handles for other processes,
                                       // which there are none of
  if (!begun()) return NOT_INITIALIZED;
  if (attribute <= 102) return cudaDeviceGetAttribute(value, attribute, device);
  *value = 0;
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = begun() && device < device_count && self->uses[devices[device].gpu].active;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  static int one;
  *context = &one;
  if (begun() && device < device_count) activate(device);
  return 0;
}
int cuCtxGetCurrent(void **context) {
  static int one;
  *context = &one;
  return 0;
}
int cuCtxGetDevice(int *device) {
  *device = current;
  return 0;
}
int cuCtxPopCurrent_v2(void **context) { return cuCtxGetCurrent(context); }
int cuCtxGetLimit(size_t *value, int limit) {
  *value = 1 << 20; // our default; of the buffer of printf the driver's
  return 0;
}
int cuPointerGetAttribute(void *value, int attribute, void *p) {
  if (attribute != DEVICE_POINTER) return NOT_SUPPORTED;
  if (!on_device(p)) return INVALID_VALUE;
  *(void **)value = p;
  return 0;
}
int cuGetErrorString(int error, const char **text) {
  *text = cudaGetErrorString(error);
  return 0;
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  return cudaGetDriverEntryPoint(name, function, flags, result);
}
