// torch's wheels bring cuda_runtime_api.h without this part of it: what the words of nvcc mean to gcc.
#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __no_return__ __attribute__((noreturn))
#define __noinline__ __attribute__((noinline))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __thread__ __thread
#define __cudart_builtin__
#define __builtin_align__(a) __align__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __location__(a) __attribute__((a))
#define __annotate__(a) __attribute__((a))
#define __CUDA_ARCH_HAS_FEATURE__(x) 0
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
