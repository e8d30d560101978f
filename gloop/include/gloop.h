/* GLoop's host side for C: link with -lgloop. Functions that return int return 0, or -1; those that
 * return pointers return NULL: gloop_error() then says why. */
#ifndef GLOOP_H
#define GLOOP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gloop_runtime gloop_runtime;
typedef struct gloop_module gloop_module;
typedef struct gloop_job gloop_job;

typedef struct {
  uint32_t logical[3]; /* logical blocks along x, y, z */
  uint32_t threads;    /* of a block */
  uint32_t blocks;     /* physical ones; 0: as many as run at a time */
  uint32_t shared;     /* bytes of dynamic shared memory */
  uint32_t kept;       /* bytes of shared memory that a block keeps over suspensions */
  uint32_t pages;      /* for data of files and sockets, of a block, at most 32 */
  uint32_t page_bytes;
} gloop_grid;

typedef struct {
  const void *value;
  size_t bytes;
} gloop_arg;

const char *gloop_error(void);
gloop_runtime *gloop_open(uint32_t gpu);
void gloop_close(gloop_runtime *);
gloop_module *gloop_load(const gloop_runtime *, const void *image, size_t bytes);
void gloop_unload(gloop_module *);
/* The kernel's first parameter is a gloop::Ctl, which is given to it; args are the others. */
gloop_job *gloop_launch(const gloop_runtime *, const gloop_module *, const char *kernel,
                        const gloop_grid *, const gloop_arg *args, size_t count);
int gloop_suspend(gloop_job *); /* waits until the GPU is free */
int gloop_resume(gloop_job *);
int gloop_finish(gloop_job *); /* runs it to its end */
int gloop_is_done(const gloop_job *);
void gloop_drop(gloop_job *);

#ifdef __cplusplus
}
#endif

#endif
