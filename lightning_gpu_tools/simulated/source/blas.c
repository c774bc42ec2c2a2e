// cuBLAS: a matrix product takes 2 m n k operations at its type's rate, and computes nothing. build.py adds the rest of
// its functions: they succeed and take no time.
#define _GNU_SOURCE
#include "runtime.h"
#include <stdlib.h>
#include <string.h>

struct handle {
  cudaStream_t stream;
  int math_mode;
};
enum { TF32_MATH = 3, HALF = 2, BFLOAT16 = 14, FLOAT8 = 28, FLOAT8_OTHER = 29, FLOAT = 0 };
static int product(cudaStream_t s, double m, double n, double k, double batches, int type, int math_mode) {
  cudaError_t error = usable();
  if (error) return 14; // CUBLAS_STATUS_INTERNAL_ERROR
  struct stream *t = stream_of(s);
  const struct gpu *g = GPU(t->device);
  double rate = type == HALF || type == BFLOAT16 || type == FLOAT8 || type == FLOAT8_OTHER ? g->half_per_ns
                : math_mode == TF32_MATH && type == FLOAT                                  ? g->tf32_per_ns
                                                                                           : g->flops_per_ns;
  double ns = 2 * m * n * k * batches / rate;
  return enqueue(t, ns > machine->kernel_ns ? ns : machine->kernel_ns, 1, NULL) ? 14 : 0;
}
int cublasCreate_v2(struct handle **h) {
  if (usable()) return 1;
  *h = calloc(1, sizeof **h);
  return 0;
}
int cublasSetStream_v2(struct handle *h, cudaStream_t s) {
  h->stream = s;
  return 0;
}
int cublasSetMathMode(struct handle *h, int mode) {
  h->math_mode = mode;
  return 0;
}
int cublasGetMathMode(struct handle *h, int *mode) {
  *mode = h->math_mode;
  return 0;
}
int cublasGetPointerMode_v2(struct handle *h, int *mode) {
  *mode = 0;
  return 0;
}

#define GEMM(name, type)                                                                                               \
  int name(struct handle *h, int ta, int tb, int m, int n, int k) {                                                    \
    return product(h->stream, m, n, k, 1, type, h->math_mode);                                                         \
  }
GEMM(cublasSgemm_v2, FLOAT);
GEMM(cublasDgemm_v2, 1);
GEMM(cublasCgemm_v2, 4);
GEMM(cublasZgemm_v2, 5);
GEMM(cublasSgemmEx, FLOAT);
int cublasGemmEx(struct handle *h, int ta, int tb, int m, int n, int k, void *alpha, void *a, int type) {
  return product(h->stream, m, n, k, 1, type, h->math_mode);
}
// In batches: alpha, A, lda, stride, B, ldb, stride, beta, C, ldc, stride, and how many.
#define STRIDED(name, type)                                                                                            \
  int name(struct handle *h, int ta, int tb, int m, int n, int k, void *al, void *a, int lda, long long sa, void *b,   \
           int ldb, long long sb, void *be, void *c, int ldc, long long sc, int batches) {                             \
    return product(h->stream, m, n, k, batches, type, h->math_mode);                                                   \
  }
STRIDED(cublasSgemmStridedBatched, FLOAT);
STRIDED(cublasDgemmStridedBatched, 1);
STRIDED(cublasCgemmStridedBatched, 4);
STRIDED(cublasZgemmStridedBatched, 5);
#define BATCHED(name, type)                                                                                            \
  int name(struct handle *h, int ta, int tb, int m, int n, int k, void *al, void *a, int lda, void *b, int ldb,        \
           void *be, void *c, int ldc, int batches) {                                                                  \
    return product(h->stream, m, n, k, batches, type, h->math_mode);                                                   \
  }
BATCHED(cublasSgemmBatched, FLOAT);
BATCHED(cublasDgemmBatched, 1);
BATCHED(cublasCgemmBatched, 4);
BATCHED(cublasZgemmBatched, 5);
int cublasGemmStridedBatchedEx(struct handle *h, int ta, int tb, int m, int n, int k, void *al, void *a, int type,
                               int lda, long long sa, void *b, int tb2, int ldb, long long sb, void *be, void *c,
                               int tc, int ldc, long long sc, int batches) {
  return product(h->stream, m, n, k, batches, type, h->math_mode);
}

struct layout {
  uint64_t rows, columns;
  int type, batches;
};
int cublasLtCreate(struct handle **h) { return cublasCreate_v2(h); }
int cublasLtMatrixLayoutCreate(struct layout **l, int type, uint64_t rows, uint64_t columns, i64 ld) {
  *l = calloc(1, sizeof **l);
  **l = (struct layout){rows, columns, type, 1};
  return 0;
}
// Attribute 5 is CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT.
int cublasLtMatrixLayoutSetAttribute(struct layout *l, int attribute, const void *value, size_t size) {
  if (attribute == 5) l->batches = *(const int *)value;
  return 0;
}
int cublasLtMatrixLayoutDestroy(struct layout *l) {
  free(l);
  return 0;
}
int cublasLtMatmulDescCreate(void **d, int compute, int scale) {
  *d = calloc(1, 64);
  *(int *)*d = compute;
  return 0;
}
int cublasLtMatmulDescDestroy(void *d) {
  free(d);
  return 0;
}
int cublasLtMatmulPreferenceCreate(void **p) {
  *p = calloc(1, 64);
  return 0;
}
int cublasLtMatmulPreferenceDestroy(void *p) {
  free(p);
  return 0;
}
struct heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, struct layout *a, struct layout *b, struct layout *c,
                                   struct layout *e, void *p, int n, struct heuristic *found, int *count) {
  memset(found, 0, sizeof *found);
  *count = 1;
  return 0;
}
int cublasLtMatmul(void *h, void *d, void *alpha, void *A, struct layout *a, void *B, struct layout *b, void *beta,
                   void *C, struct layout *c, void *D, struct layout *e, void *algorithm, void *workspace, size_t size,
                   cudaStream_t s) {
  double inner = (double)a->rows * a->columns / (e->rows ? e->rows : 1); // whichever of the two is transposed
  return product(s, e->rows, e->columns, inner, e->batches, a->type,
                 *(int *)d == 77 ? TF32_MATH : 0); // CUBLAS_COMPUTE_32F_FAST_TF32
}
