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
typedef struct gloop_member gloop_member;

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
/* The kernel's first parameter is a gloop::Ctl, which is given to it; args are the others. It does not
 * run before gloop_resume, gloop_finish or gloop_run. */
gloop_job *gloop_prepare(const gloop_runtime *, const gloop_module *, const char *kernel,
                         const gloop_grid *, const gloop_arg *args, size_t count);
/* The same, and it runs at once: not for a job that is to run in turns. */
gloop_job *gloop_launch(const gloop_runtime *, const gloop_module *, const char *kernel,
                        const gloop_grid *, const gloop_arg *args, size_t count);
int gloop_suspend(gloop_job *); /* waits until the GPU is free */
int gloop_resume(gloop_job *);
int gloop_finish(gloop_job *); /* runs it to its end */
int gloop_is_done(const gloop_job *);
void gloop_drop(gloop_job *);

/* Sharing the GPU with other processes, in turns of gantry-arbiter. A process joins once, under a name
 * and with a weight (1 to 10,000), and belongs to the arbiter until it ends. If there is no arbiter at
 * the socket, its work waits for one. */
gloop_member *gloop_join(const char *socket, const char *client, uint32_t weight);
int gloop_run(gloop_member *, gloop_job *); /* a job to its end, in turns */
uint64_t gloop_turns(const gloop_member *); /* that there were so far */

/* Where work of the program's own is; other numbers mean that it has failed. */
enum {
  GLOOP_READY = 0,   /* not begun, or stopped */
  GLOOP_WAITING = 1, /* it has left the device, since all it did was to wait */
  GLOOP_RUNNING = 2,
  GLOOP_DONE = 3
};

/* Work of the program's own that runs in turns, such as kernels that were launched otherwise and stop
 * when they are told to. Called by the thread that calls gloop_run_own, with its last argument. */
typedef struct {
  int (*resume)(void *, uint32_t turn); /* begins or goes on; not 0 if it cannot */
  int (*look)(void *);                  /* where it is, at once */
  void (*stop)(void *);                 /* its turn is over: it is to leave the device soon */
  void (*contend)(void *); /* others want the device, said again and again: leave it if it only
                            waits; may be NULL */
  void (*wait)(void *);    /* returns when something has come for it; NULL if it never waits */
} gloop_resumable;

int gloop_run_own(gloop_member *, const gloop_resumable *, void *); /* to its end, in turns */

#ifdef __cplusplus
}
#endif

#endif
