// Kernels that are computed. One gets its name as the compiler wrote it, the addresses of its arguments, and the second
// dimension of its grid; it returns what it does to memory, or NULL, and may change how long it takes.
#pragma once
typedef struct effect *compute_t(const char *name, void **arguments, unsigned rows, double *ns);
compute_t *compute_of(const char *name);
