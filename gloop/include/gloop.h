/* GLoop's host side for C: link with -lgloop. On failure, functions that return int return -1 (otherwise
 * 0), and those that return pointers return NULL. gloop_error() then returns the reason. */
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
  uint32_t threads;    /* per block */
  uint32_t blocks;     /* physical blocks; 0: as many as run concurrently */
  uint32_t shared;     /* bytes of dynamic shared memory */
  uint32_t kept;       /* bytes of shared memory that a block keeps across suspensions */
  uint32_t pages;      /* per block, for data of files and sockets, at most 32 */
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
/* The kernel's first parameter is a gloop::Ctl, which is passed automatically; args are the others. The
 * kernel does not run before gloop_resume, gloop_finish or gloop_run. */
gloop_job *gloop_prepare(const gloop_runtime *, const gloop_module *, const char *kernel,
                         const gloop_grid *, const gloop_arg *args, size_t count);
/* The same, but runs immediately: not for a job that must only run in turns. */
gloop_job *gloop_launch(const gloop_runtime *, const gloop_module *, const char *kernel,
                        const gloop_grid *, const gloop_arg *args, size_t count);
int gloop_suspend(gloop_job *); /* waits until the GPU is free */
int gloop_resume(gloop_job *);
int gloop_finish(gloop_job *); /* runs it to its end */
int gloop_is_done(const gloop_job *);
void gloop_drop(gloop_job *);

/* Sharing the GPU with other processes, in turns granted by gantry-arbiter. A process joins once, with a
 * name and a weight (1 to 10,000), and belongs to the arbiter until it ends. If there is no arbiter at
 * the socket, the process's work waits for one. */
gloop_member *gloop_join(const char *socket, const char *client, uint32_t weight);
int gloop_run(gloop_member *, gloop_job *); /* runs a job to its end, in turns */
uint64_t gloop_turns(const gloop_member *); /* number of turns so far */

/* The state of a program's own work. Other numbers mean that it has failed. */
enum {
  GLOOP_READY = 0,   /* not started, or stopped */
  GLOOP_WAITING = 1, /* it has left the device, since it only waited */
  GLOOP_RUNNING = 2,
  GLOOP_DONE = 3
};

/* A program's own work that runs in turns, such as kernels that were launched by other means and stop
 * when they are told to. The functions are called by the thread that calls gloop_run_own, with its last
 * argument. */
typedef struct {
  int (*resume)(void *, uint32_t turn); /* begins or continues; nonzero on failure */
  int (*look)(void *);                  /* returns the state immediately */
  void (*stop)(void *);                 /* the turn is over: leave the device soon */
  void (*contend)(void *); /* called repeatedly while others want the device: leave it if the work
                            only waits; may be NULL */
  void (*wait)(void *);    /* returns when there is something to do; NULL if it never waits */
} gloop_resumable;

int gloop_run_own(gloop_member *, const gloop_resumable *, void *); /* runs it to its end, in turns */

#ifdef __cplusplus
}
#endif

#endif
