/* Jobs that run in an arbiter's turns, from C (gloop/include/gloop.h):
 *
 *   turns SOCKET CLIENT WEIGHT STEPS          work of its own: a thread computes STEPS steps of 20 us
 *   turns SOCKET CLIENT WEIGHT STEPS CUBIN    a job on the GPU: throttle, compiled by gloop-eaters
 *
 * joins the arbiter at the socket, computes in its turns, and prints the number of turns. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <gloop.h>

static void fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, gloop_error());
  exit(1);
}

/* ---- work of its own ---- */

struct work {
  pthread_t thread;
  int has_thread;
  atomic_int stopping, left;
  uint64_t done, steps; /* the thread's while there is one */
};

static void *compute(void *context) {
  struct work *work = context;
  while (work->done < work->steps && !atomic_load(&work->stopping)) {
    struct timespec begun, now;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - begun.tv_sec) * 1000000000L + now.tv_nsec - begun.tv_nsec < 20000);
    ++work->done;
  }
  atomic_store(&work->left, 1);
  return NULL;
}

static int resume(void *context, uint32_t turn) {
  struct work *work = context;
  (void)turn;
  atomic_store(&work->stopping, 0);
  atomic_store(&work->left, 0);
  if (pthread_create(&work->thread, NULL, compute, work) != 0) return 1;
  work->has_thread = 1;
  return 0;
}

static int look(void *context) {
  struct work *work = context;
  if (work->has_thread) {
    if (!atomic_load(&work->left)) return GLOOP_RUNNING;
    pthread_join(work->thread, NULL);
    work->has_thread = 0;
  }
  return work->done == work->steps ? GLOOP_DONE : GLOOP_READY;
}

static void stop(void *context) {
  struct work *work = context;
  atomic_store(&work->stopping, 1);
}

static void run_own(gloop_member *member, uint64_t steps) {
  static const gloop_resumable functions = {resume, look, stop, NULL, NULL};
  struct work work = {.steps = steps};
  if (gloop_run_own(member, &functions, &work) != 0) fail("it did not run");
}

/* ---- a job on the GPU ---- */

static void *contents(const char *path, size_t *bytes) {
  FILE *file = fopen(path, "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0) return NULL;
  *bytes = (size_t)ftell(file);
  rewind(file);
  void *data = malloc(*bytes);
  if (data != NULL && fread(data, 1, *bytes, file) != *bytes) data = NULL;
  fclose(file);
  return data;
}

/* Allocates GPU memory as any program may: here through the driver's own interface, looked up at run
 * time, so that no part of CUDA is needed to compile this. */
static uint64_t allocate(size_t bytes) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) return 0;
  int (*retain)(void **, int);
  int (*set_current)(void *);
  int (*mem_alloc)(uint64_t *, size_t);
  *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
  *(void **)&set_current = dlsym(driver, "cuCtxSetCurrent");
  *(void **)&mem_alloc = dlsym(driver, "cuMemAlloc_v2");
  void *context;
  uint64_t at;
  if (retain(&context, 0) != 0 || set_current(context) != 0 || mem_alloc(&at, bytes) != 0) return 0;
  return at;
}

static void run_job(gloop_member *member, const char *cubin, uint32_t steps) {
  size_t bytes;
  void *image = contents(cubin, &bytes);
  if (image == NULL) {
    perror(cubin);
    exit(1);
  }
  gloop_runtime *runtime = gloop_open(0);
  if (runtime == NULL) fail("no GPU");
  gloop_module *module = gloop_load(runtime, image, bytes);
  if (module == NULL) fail("no code for this GPU");
  struct {
    uint64_t out;
    uint32_t count, cycles;
  } parameters = {allocate(528 * 4), steps, 0};
  if (parameters.out == 0) {
    fprintf(stderr, "no memory\n");
    exit(1);
  }
  const gloop_grid grid = {.logical = {528, 1, 1}, .threads = 256};
  const gloop_arg arg = {&parameters, sizeof parameters};
  gloop_job *job = gloop_prepare(runtime, module, "checked", &grid, &arg, 1);
  if (job == NULL) fail("no job");
  if (gloop_is_done(job)) fail("it is done before it has begun");
  if (gloop_run(member, job) != 0) fail("it did not run");
  if (!gloop_is_done(job)) fail("it is not done");
  gloop_drop(job);
  gloop_unload(module);
  gloop_close(runtime);
}

int main(int count, char **words) {
  if (count != 5 && count != 6) {
    fprintf(stderr, "usage: turns SOCKET CLIENT WEIGHT STEPS [CUBIN]\n");
    return 2;
  }
  gloop_member *member = gloop_join(words[1], words[2], (uint32_t)strtoul(words[3], NULL, 10));
  if (member == NULL) fail("cannot join");
  if (gloop_join(words[1], words[2], 1) != NULL) {
    fprintf(stderr, "it has joined twice\n");
    return 1;
  }
  const uint64_t steps = strtoull(words[4], NULL, 10);
  if (count == 6) run_job(member, words[5], (uint32_t)steps);
  else run_own(member, steps);
  printf("%s: %llu steps in %llu turns\n", words[2], (unsigned long long)steps,
         (unsigned long long)gloop_turns(member));
  return 0;
}
