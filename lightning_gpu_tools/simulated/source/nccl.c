// NCCL between processes of one machine, or GPUs of one process. A collective starts when its stream comes to it, keeps
// its GPU busy until every rank has come, as NCCL's kernels do, and then takes its bytes at nccl_gb_s. A rank that
// calls something else, or another size, leaves all of them waiting; so does one that never comes.
#define _GNU_SOURCE
#include "runtime.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANKS 16
#define SLOTS 4           // rounds that a rank may be ahead of another
#define CHUNK (1UL << 20) // bytes of a round
#define MOVED                                                                                                          \
  (64UL << 20)        // larger messages take their time and move nothing: the host has neither the memory nor the time
#define LATENCY 15000 // ns of a small collective between GPUs of one machine: our default
enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT };
enum what { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE };
enum operation { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, SCALED_SUMS };
struct round {
  volatile i64 number[RANKS];
  i64 start[RANKS], what[RANKS];
  size_t bytes[RANKS];
};
struct mail {
  volatile i64 posted, taken;
  volatile i64 sent_at, received_at;
  volatile size_t whole, bytes;
};
struct board { // one file for each communicator
  volatile int joined[RANKS];
  volatile i64 done[RANKS];
  struct {
    volatile i64 number;
    int color, key;
  } splits[2][RANKS];
  struct round rounds[SLOTS];
  struct mail mails[RANKS][RANKS];
  char data[SLOTS][RANKS][CHUNK], letters[RANKS][RANKS][CHUNK];
};
struct comm {
  int rank, ranks, device, aborted;
  i64 tickets, turn, round, splits;
  struct board *board;
  char name[128];
};
struct collective { // or one part of a group of sends and receives
  struct comm *comm;
  enum what what;
  int type, operation, peer, posted, finished;
  i64 ticket, start, end;
  size_t count, offset;
  const void *from;
  void *to;
  struct collective *also;
};
typedef struct {
  char text[128];
} unique_id;

static size_t width(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type < 10 ? widths[type] : 1;
}
static double scales[64];
static int scaled;

static float of_bfloat(uint16_t b) {
  uint32_t u = (uint32_t)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static uint16_t to_bfloat(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
static double combined(double a, double b, int operation) {
  return operation == PRODUCT   ? a * b
         : operation == MAXIMUM ? (a > b ? a : b)
         : operation == MINIMUM ? (a < b ? a : b)
                                : a + b;
}
#define COMBINE(type, T)                                                                                               \
  case type: {                                                                                                         \
    T *a = to;                                                                                                         \
    const T *b = from;                                                                                                 \
    for (size_t i = 0; i < n; i++)                                                                                     \
      a[i] = operation == PRODUCT   ? a[i] * b[i]                                                                      \
             : operation == MAXIMUM ? (a[i] > b[i] ? a[i] : b[i])                                                      \
             : operation == MINIMUM ? (a[i] < b[i] ? a[i] : b[i])                                                      \
                                    : a[i] + b[i];                                                                     \
    break;                                                                                                             \
  }
static void combine(void *to, const void *from, size_t n, int type, int operation) {
  switch (type) { // the numbers of ncclDataType_t
    COMBINE(0, signed char)
    COMBINE(1, unsigned char)
    COMBINE(2, int)
    COMBINE(3, unsigned)
    COMBINE(4, long long)
    COMBINE(5, unsigned long long)
    COMBINE(7, float)
    COMBINE(8, double)
#ifdef __FLT16_MAX__
    COMBINE(6, _Float16)
#endif
    case 9: {
      uint16_t *a = to;
      const uint16_t *b = from;
      for (size_t i = 0; i < n; i++) a[i] = to_bfloat(combined(of_bfloat(a[i]), of_bfloat(b[i]), operation));
    }
  }
}
static void scale(void *to, size_t n, int type, double by) {
  for (size_t i = 0; i < n; i++) switch (type) {
      case 7: ((float *)to)[i] *= by; break;
      case 8: ((double *)to)[i] *= by; break;
#ifdef __FLT16_MAX__
      case 6: ((_Float16 *)to)[i] *= by; break;
#endif
      case 9: ((uint16_t *)to)[i] = to_bfloat(of_bfloat(((uint16_t *)to)[i]) * by);
    }
}
static void reduce(struct collective *c, char *to, char (*data)[CHUNK], size_t at, size_t size) {
  size_t n = size / width(c->type);
  int ranks = c->comm->ranks;
  memcpy(to, data[0] + at, size);
  for (int r = 1; r < ranks; r++) combine(to, data[r] + at, n, c->type, c->operation);
  if (c->operation == AVERAGE) scale(to, n, c->type, 1.0 / ranks);
  if (c->operation >= SCALED_SUMS) scale(to, n, c->type, scales[c->operation - SCALED_SUMS]);
}

static size_t own(const struct collective *c) { return c->count * width(c->type); }
// Whether each rank gets another part.
static int to_each(const struct collective *c) { return c->what == REDUCE_SCATTER || c->what == ALL_TO_ALL; }
static size_t piece(const struct collective *c) { // of this round, for each rank that gets another one
  size_t left = own(c) - c->offset, most = to_each(c) ? CHUNK / c->comm->ranks / 16 * 16 : CHUNK;
  return own(c) > MOVED ? left : left < most ? left : most;
}
static void put(struct collective *c, char *to, size_t size) {
  if (!to_each(c))
    memcpy(to, (const char *)c->from + c->offset, size);
  else
    for (int r = 0; r < c->comm->ranks; r++)
      memcpy(to + r * size, (const char *)c->from + r * own(c) + c->offset, size);
}
static void get(struct collective *c, char (*data)[CHUNK], size_t size) {
  char *to = (char *)c->to + c->offset;
  int me = c->comm->rank, is_root = me == c->peer;
  if (c->what == ALL_REDUCE || (c->what == REDUCE && is_root))
    reduce(c, to, data, 0, size);
  else if (c->what == REDUCE_SCATTER)
    reduce(c, to, data, me * size, size);
  else if (c->what == BROADCAST)
    memcpy(to, data[c->peer], size);
  else if (c->what == ALL_TO_ALL)
    for (int r = 0; r < c->comm->ranks; r++) memcpy(to + r * own(c), data[r] + me * size, size);
  else if (c->what == ALL_GATHER || (c->what == GATHER && is_root))
    for (int r = 0; r < c->comm->ranks; r++) memcpy(to + r * own(c), data[r], size);
}
static int meet(struct collective *c) { // returns whether this rank is done with it
  struct comm *m = c->comm;
  struct board *b = m->board;
  if (c->ticket != m->turn) return 0;
  for (;;) {
    size_t size = piece(c);
    int moves = own(c) <= MOVED;
    if (!c->posted) {
      for (int r = 0; r < m->ranks; r++)
        if (b->done[r] < m->round + 1 - SLOTS) return 0;
      i64 number = ++m->round;
      struct round *t = &b->rounds[number % SLOTS];
      t->start[m->rank] = c->start;
      t->what[m->rank] = c->what * 100 + c->peer;
      t->bytes[m->rank] = own(c);
      if (moves) put(c, b->data[number % SLOTS][m->rank], size);
      __sync_synchronize();
      t->number[m->rank] = number;
      c->posted = 1;
    }
    struct round *t = &b->rounds[m->round % SLOTS];
    for (int r = 0; r < m->ranks; r++) {
      if (t->number[r] != m->round || t->what[r] != t->what[m->rank] || t->bytes[r] != own(c)) return 0;
      if (t->start[r] > c->end) c->end = t->start[r];
    }
    __sync_synchronize();
    if (moves) get(c, b->data[m->round % SLOTS], size);
    __sync_synchronize();
    b->done[m->rank] = m->round;
    c->offset += size;
    c->posted = 0;
    if (c->offset >= own(c)) break;
  }
  m->turn++;
  c->end += LATENCY + own(c) * (to_each(c) || c->what == ALL_GATHER ? m->ranks : 1) / machine->nccl_per_ns;
  return 1;
}
static int pass(struct collective *c) { // a send or a receive
  struct comm *m = c->comm;
  int sends = c->what == SEND;
  int from = sends ? m->rank : c->peer, to = sends ? c->peer : m->rank;
  struct mail *mail = &m->board->mails[from][to];
  for (;;) {
    size_t size = piece(c);
    int moves = own(c) <= MOVED;
    if (sends && !c->posted) {
      if (mail->posted != mail->taken) return 0;
      if (moves) memcpy(m->board->letters[from][to], (const char *)c->from + c->offset, size);
      mail->sent_at = c->start;
      mail->whole = own(c);
      mail->bytes = size;
      __sync_synchronize();
      mail->posted++;
      c->posted = 1;
    }
    if (sends && mail->taken != mail->posted) return 0;
    if (!sends) {
      mail->received_at = c->start;
      if (mail->posted == mail->taken || mail->whole != own(c)) return 0;
      if (moves) memcpy((char *)c->to + c->offset, m->board->letters[from][to], size);
      if (mail->sent_at > c->end) c->end = mail->sent_at;
      __sync_synchronize();
      mail->taken++;
    } else if (mail->received_at > c->end)
      c->end = mail->received_at;
    c->offset += size;
    c->posted = 0;
    if (c->offset >= own(c)) break;
  }
  c->end += LATENCY + own(c) / machine->nccl_per_ns;
  return 1;
}
int arrive(struct stream *s, struct op *o) {
  volatile i64 *waiting = &self->uses[devices[s->device].gpu].waiting_since;
  i64 start = s->until > o->queued ? s->until : o->queued, end = start;
  int all = 1;
  for (struct collective *c = o->collective; c; c = c->also) {
    if (!c->start) c->start = c->end = start;
    if (c->comm->aborted && !c->finished) {
      c->finished = 1;
      c->end = machine_now();
    }
    if (!c->finished) c->finished = c->what == SEND || c->what == RECEIVE ? pass(c) : meet(c);
    if (c->end > end) end = c->end;
    all &= c->finished;
  }
  if (!o->booked) o->booked = start;
  if (!all) {
    i64 now = machine_now();
    activate(s->device);
    if (now > o->booked) {
      machine_book(self, devices[s->device].gpu, o->booked, now);
      *waiting = o->booked = now;
    }
    return 0;
  }
  *waiting = 0;
  machine_book(self, devices[s->device].gpu, o->booked, end);
  work(s, end - start, 0, start);
  while (o->collective) {
    struct collective *c = o->collective;
    o->collective = c->also;
    free(c);
  }
  return 1;
}
void collective_copied(struct op *o) { // for one more replay of a graph
  struct collective **to = &o->collective;
  for (struct collective *c = *to; c; c = c->also, to = &(*to)->also) {
    struct collective *n = malloc(sizeof *n);
    *n = *c;
    n->ticket = c->what < SEND ? c->comm->tickets++ : 0;
    *to = n;
  }
}

static void *progress(void *unused) {
  for (int pending = 0;; usleep(pending ? 50 : 500)) {
    pthread_mutex_lock(&lock);
    settle_all();
    pending = 0;
    for (struct stream *s = streams; s; s = s->next) pending |= s->first != NULL;
    pthread_mutex_unlock(&lock);
  }
  return NULL;
}
static void begin_progress(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, progress, NULL);
  pthread_detach(thread);
}
static int add(struct stream *s, struct collective *c) {
  struct op op = {.kind = COLLECTIVE, .collective = c};
  pthread_mutex_lock(&lock);
  if (s->capture)
    capture_op(s, op);
  else {
    for (struct collective *one = c; one; one = one->also)
      if (one->what < SEND) one->ticket = one->comm->tickets++;
    settle(s);
    op.queued = machine_now();
    append(s, op);
    settle(s);
  }
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
static __thread int grouped;
static __thread struct {
  struct stream *stream;
  struct collective *first;
} groups[RANKS];
static __thread int group_count;
static int start(enum what what, const void *from, void *to, size_t count, int type, int operation, int peer,
                 struct comm *m, cudaStream_t stream) {
  if (usable()) return CUDA_ERROR;
  struct stream *s = stream_of(stream);
  struct collective *c = malloc(sizeof *c);
  *c = (struct collective){.comm = m,
                           .what = what,
                           .type = type,
                           .operation = operation,
                           .peer = peer,
                           .count = count,
                           .from = from,
                           .to = to};
  if (!grouped || what < SEND) return add(s, c);
  int i = 0;
  while (i < group_count && groups[i].stream != s) i++; // what is sent and received in a group happens at once
  if (i == RANKS) return INTERNAL_ERROR;
  if (i == group_count) {
    groups[i].stream = s;
    groups[i].first = NULL;
    group_count++;
  }
  struct collective **last = &groups[i].first;
  while (*last) last = &(*last)->also;
  *last = c;
  return SUCCESS;
}
int ncclGroupStart(void) {
  grouped++;
  return SUCCESS;
}
int ncclGroupEnd(void) {
  if (!--grouped) {
    for (int i = 0; i < group_count; i++) add(groups[i].stream, groups[i].first);
    group_count = 0;
  }
  return SUCCESS;
}
int ncclAllReduce(const void *a, void *b, size_t n, int type, int operation, struct comm *m, cudaStream_t s) {
  return start(ALL_REDUCE, a, b, n, type, operation, 0, m, s);
}
int ncclBroadcast(const void *a, void *b, size_t n, int type, int root, struct comm *m, cudaStream_t s) {
  return start(BROADCAST, a, b, n, type, 0, root, m, s);
}
int ncclBcast(void *a, size_t n, int type, int root, struct comm *m, cudaStream_t s) {
  return start(BROADCAST, a, a, n, type, 0, root, m, s);
}
int ncclReduce(const void *a, void *b, size_t n, int type, int operation, int root, struct comm *m, cudaStream_t s) {
  return start(REDUCE, a, b, n, type, operation, root, m, s);
}
int ncclAllGather(const void *a, void *b, size_t n, int type, struct comm *m, cudaStream_t s) {
  return start(ALL_GATHER, a, b, n, type, 0, 0, m, s);
}
int ncclGather(const void *a, void *b, size_t n, int type, int root, struct comm *m, cudaStream_t s) {
  return start(GATHER, a, b, n, type, 0, root, m, s);
}
int ncclReduceScatter(const void *a, void *b, size_t n, int type, int operation, struct comm *m, cudaStream_t s) {
  return start(REDUCE_SCATTER, a, b, n, type, operation, 0, m, s);
}
int ncclAlltoAll(const void *a, void *b, size_t n, int type, struct comm *m, cudaStream_t s) {
  return start(ALL_TO_ALL, a, b, n, type, 0, 0, m, s);
}
int ncclSend(const void *a, size_t n, int type, int peer, struct comm *m, cudaStream_t s) {
  return start(SEND, a, NULL, n, type, 0, peer, m, s);
}
int ncclRecv(void *a, size_t n, int type, int peer, struct comm *m, cudaStream_t s) {
  return start(RECEIVE, NULL, a, n, type, 0, peer, m, s);
}
int ncclRedOpCreatePreMulSum(int *operation, void *by, int type, int residence, struct comm *m) {
  int i = scaled++ % 64;
  scales[i] = type == 8 ? *(double *)by : type == 7 ? *(float *)by : type == 9 ? of_bfloat(*(uint16_t *)by) : 1;
#ifdef __FLT16_MAX__
  if (type == 6) scales[i] = *(_Float16 *)by;
#endif
  *operation = SCALED_SUMS + i;
  return SUCCESS;
}

int ncclGetUniqueId(unique_id *id) {
  unsigned char random[12];
  FILE *f = fopen("/dev/urandom", "rb");
  if (!f || fread(random, 1, sizeof random, f) != sizeof random) return SYSTEM_ERROR;
  fclose(f);
  memset(id, 0, sizeof *id);
  strcpy(id->text, "nccl-");
  for (size_t i = 0; i < sizeof random; i++) sprintf(id->text + 5 + 2 * i, "%02x", random[i]);
  return SUCCESS;
}
static struct comm *opened(const char *name, int ranks, int rank, int device) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  char path[4096];
  pthread_once(&once, begin_progress);
  snprintf(path, sizeof path, "%s/%s", getenv("SIMULATED_CUDA"), name);
  int f = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  struct comm *m = calloc(1, sizeof *m);
  m->rank = rank;
  m->ranks = ranks;
  m->device = device;
  snprintf(m->name, sizeof m->name, "%s", name);
  m->board = f < 0 || ftruncate(f, sizeof(struct board))
                 ? MAP_FAILED
                 : mmap(NULL, sizeof(struct board), PROT_READ | PROT_WRITE, MAP_SHARED, f, 0);
  if (f >= 0) close(f);
  if (m->board == MAP_FAILED) {
    free(m);
    return NULL;
  }
  m->board->joined[rank] = 1;
  activate(device);
  return m;
}
static int joined(struct comm *m) { // the last of them removes the file
  char path[4096];
  volatile int *there = m->board->joined;
  i64 end = machine_now() + 600000000000LL;
  for (int r = 0; r < m->ranks; r++)
    while (!there[r]) {
      if (machine_now() > end) return INTERNAL_ERROR;
      usleep(500);
    }
  there[m->rank] = 2;
  snprintf(path, sizeof path, "%s/%s", getenv("SIMULATED_CUDA"), m->name);
  if (m->rank == 0) {
    for (int r = 0; r < m->ranks; r++)
      while (there[r] < 2 && machine_now() < end) usleep(500);
    unlink(path);
  }
  return SUCCESS;
}
int ncclCommInitRankConfig(struct comm **to, int ranks, unique_id id, int rank, void *config) {
  if (usable()) return CUDA_ERROR;
  if (ranks > RANKS) return INVALID_ARGUMENT;
  id.text[127] = 0;
  *to = opened(id.text, ranks, rank, current);
  return *to ? joined(*to) : SYSTEM_ERROR;
}
int ncclCommInitAll(struct comm **to, int ranks, const int *list) {
  unique_id id;
  if (usable()) return CUDA_ERROR;
  if (ranks > RANKS || ncclGetUniqueId(&id)) return INVALID_ARGUMENT;
  for (int r = 0; r < ranks; r++)
    if (!(to[r] = opened(id.text, ranks, r, list ? list[r] : r))) return SYSTEM_ERROR;
  for (int r = ranks - 1; r >= 0; r--) {
    int result = joined(to[r]);
    if (result) return result;
  }
  return SUCCESS;
}
int ncclCommSplit(struct comm *m, int color, int key, struct comm **to, void *config) {
  i64 number = ++m->splits, end = machine_now() + 600000000000LL;
  int rank = 0, ranks = 0;
  char name[160];
  __typeof__(m->board->splits[0][0]) *all = m->board->splits[number % 2], *mine = &all[m->rank];
  *to = NULL;
  mine->color = color;
  mine->key = key;
  __sync_synchronize();
  mine->number = number;
  for (int r = 0; r < m->ranks; r++)
    while (all[r].number < number) {
      if (machine_now() > end) return INTERNAL_ERROR;
      usleep(500);
    }
  if (color < 0) return SUCCESS; // NCCL_SPLIT_NOCOLOR
  for (int r = 0; r < m->ranks; r++)
    if (all[r].color == color) {
      ranks++;
      rank += all[r].key < key || (all[r].key == key && r < m->rank);
    }
  snprintf(name, sizeof name, "%s-%lld-%d", m->name, (long long)number, color);
  *to = opened(name, ranks, rank, m->device);
  return *to ? joined(*to) : SYSTEM_ERROR;
}
int ncclCommAbort(struct comm *m) {
  m->aborted = 1;
  return SUCCESS;
}
int ncclCommGetAsyncError(struct comm *m, int *error) {
  *error = SUCCESS;
  return SUCCESS;
}
int ncclCommCount(struct comm *m, int *n) {
  *n = m->ranks;
  return SUCCESS;
}
int ncclCommUserRank(struct comm *m, int *rank) {
  *rank = m->rank;
  return SUCCESS;
}
int ncclCommRegister(struct comm *m, void *p, size_t size, void **handle) {
  *handle = NULL;
  return SUCCESS;
}
int ncclGetVersion(int *version) {
  *version = 22703;
  return SUCCESS;
}
const char *ncclGetErrorString(int error) {
  return error ? error == CUDA_ERROR ? "unhandled cuda error" : "not there in the simulated NCCL" : "no error";
}
const char *ncclGetLastError(struct comm *m) { return ""; }
int ncclMemAlloc(void **p, size_t size) { return cudaMalloc(p, size) ? SYSTEM_ERROR : SUCCESS; }
int ncclMemFree(void *p) { return cudaFree(p) ? INVALID_ARGUMENT : SUCCESS; }
