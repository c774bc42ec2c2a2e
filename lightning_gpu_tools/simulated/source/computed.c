// The kernels whose results decide what the host does next: how long a sleep takes, how much a mask selects, which
// integers there are, whether any or all of something is true, and those by which torch sends Python objects over NCCL
// (fill and join, and of sizes: add, compare, sum, largest). Names and arguments are those of torch 2.6 to 2.15.
#define _GNU_SOURCE
#include "runtime.h"
#include "computed.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// torch.cuda._sleep(cycles): a cycle is a nanosecond here.
static struct effect *spin(const char *name, void **arguments, unsigned rows, double *ns) {
  *ns = *(i64 *)arguments[0];
  return NULL;
}

// vectorized_elementwise_kernel or unrolled_elementwise_kernel(int count, functor, array of pointers, ...)
#define FILLED (64UL << 20) // a larger tensor is not filled: the host does not have that memory
struct fill {
  struct effect effect;
  char *to;
  size_t count, width;
  char value[16];
};
static size_t width_of(const char *type) { // as the compiler writes it
  if (!strncmp(type, "N3c104Half", 10) || !strncmp(type, "N3c108BFloat16", 14)) return 2;
  if (!strncmp(type, "N3c107complexIfE", 16)) return 8;
  switch (*type) {
    case 'b':
    case 'h':
    case 'a': return 1;
    case 's':
    case 't': return 2;
    case 'i':
    case 'j':
    case 'f': return 4;
    case 'l':
    case 'm':
    case 'd': return 8;
  }
  return 0;
}
static void run_fill(struct effect *effect) {
  struct fill *f = (struct fill *)effect;
  for (size_t i = 0; i < f->count; i++) memcpy(f->to + i * f->width, f->value, f->width);
}
static struct effect *fill(const char *name, void **arguments, unsigned rows, double *ns) {
  size_t width = width_of(strstr(name, "FillFunctorI") + 12), count = *(int *)arguments[0];
  if (!width || count * width > FILLED) return NULL;
  struct fill *f = malloc(sizeof *f);
  *f = (struct fill){.effect = {run_fill}, .count = count, .width = width};
  f->to = *(char **)arguments[2];
  memcpy(f->value, arguments[1], width);
  return &f->effect;
}

// How much a mask selects, which decides sizes: all, the most that it can be. cub counts it with one kernel, or in parts
// with one and all parts with another; the first part then has all. Arguments: input, output, how many.
long simulated_cuda_masks;
static struct effect *count(const char *name, void **arguments, unsigned rows, double *ns) {
  if (!strstr(name, "NonZeroOp")) return copy_effect(*(void **)arguments[1], *(void **)arguments[0], sizeof(int));
  simulated_cuda_masks++;
  struct fill *f = malloc(sizeof *f);
  *f = (struct fill){.effect = {run_fill}, .to = *(char **)arguments[1], .count = 1, .width = sizeof(int)};
  memcpy(f->value, arguments[2], sizeof(int));
  return &f->effect;
}

// Two sizes, by the functor's operation: >=, >, <=, <
struct compare {
  struct effect effect;
  char *to;
  const i64 *a, *b;
  size_t count;
  int operation;
};
static void run_compare(struct effect *effect) {
  struct compare *c = (struct compare *)effect;
  for (size_t i = 0; i < c->count; i++) {
    i64 a = c->a[i], b = c->b[i];
    c->to[i] = c->operation == 0 ? a >= b : c->operation == 1 ? a > b : c->operation == 2 ? a <= b : a < b;
  }
}
static struct effect *compare(const char *name, void **arguments, unsigned rows, double *ns) {
  char **pointers = arguments[2];
  struct compare *c = malloc(sizeof *c);
  *c = (struct compare){{run_compare},      pointers[0],          (i64 *)pointers[1],
                        (i64 *)pointers[2], *(int *)arguments[0], *(int *)arguments[1]};
  return &c->effect;
}

// self + alpha * other, of two tensors (the functor is alpha) or of a tensor and a number (other, alpha).
struct sizes_sum {
  struct effect effect;
  i64 *to;
  const i64 *a, *b;
  i64 other, alpha;
  size_t count;
};
static void run_add(struct effect *effect) {
  struct sizes_sum *s = (struct sizes_sum *)effect;
  for (size_t i = 0; i < s->count; i++) s->to[i] = s->a[i] + s->alpha * (s->b ? s->b[i] : s->other);
}
static struct effect *add(const char *name, void **arguments, unsigned rows, double *ns) {
  int one = strstr(name, "OnSelf") != NULL;
  i64 **pointers = arguments[2], *numbers = arguments[1];
  struct sizes_sum *s = malloc(sizeof *s);
  *s =
      (struct sizes_sum){{run_add},    pointers[0],         pointers[1], one ? NULL : pointers[2], one ? numbers[0] : 0,
                         numbers[one], *(int *)arguments[0]};
  return &s->effect;
}

// CatArrayBatchedCopy*(output, inputs, sizes and strides, dimension, elements of an entry): a row of the grid for each
// input. Of the inputs: pointers, offsets, sizes along the dimension, counts; each an array of as many as fit.
struct piece {
  char *to;
  const char *from;
  size_t size;
};
struct join {
  struct effect effect;
  unsigned count;
  struct piece pieces[];
};
static void run_join(struct effect *effect) {
  struct join *j = (struct join *)effect;
  for (unsigned i = 0; i < j->count; i++) memmove(j->pieces[i].to, j->pieces[i].from, j->pieces[i].size);
}
static size_t at(const char *array, unsigned i, char index) {
  return index == 'j' ? ((const unsigned *)array)[i] : ((const size_t *)array)[i];
}
static struct effect *join(const char *name, void **arguments, unsigned rows, double *ns) {
  int width, dimensions, room, read = 0;
  char index;
  if (sscanf(strstr(name, "OpaqueTypeILj") + 13, "%dEEE%cLi%dELi%dE%n", &width, &index, &dimensions, &room, &read) <
          4 ||
      (index != 'j' && index != 'm') || rows > (unsigned)room)
    return NULL;
  if (*(int *)arguments[3] != 0) return NULL; // along another dimension the pieces are not contiguous
  size_t step = index == 'j' ? 4 : 8, entry = at(arguments[4], 0, index), whole = 0;
  char *output = *(char **)arguments[0];
  const char *inputs = arguments[1];
  const char *offsets = inputs + room * sizeof(void *), *counts = offsets + 2 * room * step;
  struct join *j = malloc(sizeof *j + rows * sizeof(struct piece));
  j->effect = (struct effect){run_join};
  j->count = rows;
  for (unsigned i = 0; i < rows; i++) {
    j->pieces[i] = (struct piece){output + at(offsets, i, index) * entry * width, ((const char **)inputs)[i],
                                  at(counts, i, index) * width};
    whole += j->pieces[i].size;
  }
  if (whole > FILLED) {
    free(j);
    return NULL;
  }
  return &j->effect;
}

// The values of a tensor of integers, if they are asked for as torch.unique does: 0 and 1, as of labels. Arguments: input,
// flags, values, how many there are, ..., how many elements.
static const i64 numbers_to_2[] = {0, 1, 2};
static struct effect *write_numbers(unsigned count, struct piece *pieces) {
  struct join *j = malloc(sizeof *j + count * sizeof *pieces);
  j->effect = (struct effect){run_join};
  j->count = count;
  memcpy(j->pieces, pieces, count * sizeof *pieces);
  return &j->effect;
}
static struct effect *unique(const char *name, void **arguments, unsigned rows, double *ns) {
  size_t width = width_of(strstr(name, "policy_hubI") + 11);
  int found = *(int *)arguments[7] > 1 ? 2 : 1;
  char *values = *(char **)arguments[2];
  return write_numbers(found + 1, (struct piece[]){{*(char **)arguments[3], (char *)&numbers_to_2[found], sizeof(i64)},
                                                   {values, (char *)&numbers_to_2[0], width},
                                                   {values + width, (char *)&numbers_to_2[1], width}});
}

// reduce_kernel(functor): the sum or the largest of sizes. It begins with the operation, the identity, the size of an
// element, and the numbers of inputs and outputs. Where it holds the pointers differs between versions: the input's,
// the output's or those of two, and NULL. A minimum is 0, and so is the largest of the same numbers after it, or with
// it: torch.bincount, which asks for both, then returns the length that it was asked for.
struct reduction {
  struct effect effect;
  i64 *to;
  const i64 *from;
  int count, largest;
};
static void run_reduction(struct effect *effect) {
  struct reduction *r = (struct reduction *)effect;
  i64 result = r->largest ? INT64_MIN : 0;
  for (int i = 0; i < r->count; i++)
    result = !r->largest ? result + r->from[i] : r->from[i] > result ? r->from[i] : result;
  *r->to = result;
}
static struct effect *reduction(const char *name, void **arguments, unsigned rows, double *ns) {
  static __thread const void *least_of;
  const int *numbers = arguments[0];
  void *const *words = arguments[0];
  const void *before = least_of;
  int both = strstr(name, "MinMaxOps") != NULL, least = strstr(name, "MinNanFunctor") != NULL;
  least_of = NULL;
  for (int i = 8; i < 256; i++)
    if (on_device(words[i]) && on_device(words[i + 1]) && (both ? on_device(words[i + 2]) : !words[i + 2])) {
      if (least) least_of = words[i];
      if (both || least || before == words[i]) 
        return write_numbers(1 + both, (struct piece[]){{words[i + 1], (char *)numbers_to_2, sizeof(i64)},
                                                        {words[i + 2], (char *)numbers_to_2, sizeof(i64)}});
      if (numbers[4] != sizeof(i64) || numbers[6] != 1 || numbers[5] > 65536) return NULL;
      struct reduction *r = malloc(sizeof *r);
      *r = (struct reduction){
          {run_reduction}, words[i + 1], words[i], numbers[5], strstr(name, "MaxNanFunctor") != NULL};
      return &r->effect;
    }
  return NULL;
}

// reduce_kernel(functor): whether any of truth values is true, or all: a check finds nothing, so not any, but all. Each of
// the numbers before is smaller than for sizes.
static struct effect *check(const char *name, void **arguments, unsigned rows, double *ns) {
  const int *numbers = arguments[0];
  void *const *words = arguments[0];
  for (int i = 4; i < 256 && numbers[1] == 1 && numbers[3] > 0; i++)
    if (on_device(words[i]) && on_device(words[i + 1]) && !words[i + 2])
      return set_effect(words[i + 1], strstr(name, "and_kernel") != NULL, numbers[3]);
  return NULL;
}

compute_t *compute_of(const char *name) {
  int elementwise = strstr(name, "29vectorized_elementwise_kernel") || strstr(name, "27unrolled_elementwise_kernel");
  if (strstr(name, "spin_kernel")) return spin;
  if (elementwise && strstr(name, "11FillFunctorI") && strstr(name, "arrayIPcLm1E") && !strstr(name, "StoreWithCast"))
    return fill;
  if (elementwise && strstr(name, "CompareKernels_cu") && strstr(name, "14CompareFunctorIlE") &&
      strstr(name, "arrayIPcLm3E") && !strstr(name, "StoreWithCast"))
    return compare;
  if (elementwise && (strstr(name, "CUDAFunctor_addIlE") || strstr(name, "CUDAFunctorOnSelf_addIlE")) &&
      !strstr(name, "StoreWithCast"))
    return add;
  if (strstr(name, "13reduce_kernel") && strstr(name, "8ReduceOpIl") &&
      (strstr(name, "11sum_functorIlllE") || strstr(name, "13MaxNanFunctorIlE") || strstr(name, "13MinNanFunctorIlE") ||
       strstr(name, "MinMaxOpsIlliE")))
    return reduction;
  if (strstr(name, "13reduce_kernel") && strstr(name, "8ReduceOpIb") &&
      (strstr(name, "or_kernel_cuda") || strstr(name, "and_kernel_cuda")))
    return check;
  if (strstr(name, "DeviceSelectSweepKernel") && strstr(name, "equal_to") && width_of(strstr(name, "policy_hubI") + 11))
    return unique;
  if (strstr(name, "DeviceReduce") && (strstr(name, "NonZeroOp") || strstr(name, "SingleTileKernelI") && strstr(name, "EPiS")))
    return count;
  if (strstr(name, "CatArrayBatchedCopy") && strstr(name, "OpaqueTypeILj")) return join;
  return NULL;
}
