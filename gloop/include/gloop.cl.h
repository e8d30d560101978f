// GLoop for OpenCL C 2.0 and 3.0: kernels that stop at a poll and continue in a later launch.
//
// There are no callbacks here: a kernel keeps its state in a structure of its own, polls between two
// steps, and returns when it is told to stop. The host enqueues it again until it reports that it is
// done. The host writes the stop word while the kernel runs, which OpenCL only allows for
// fine-grained shared virtual memory with atomics (CL_DEVICE_SVM_ATOMICS).
//
//   __kernel void serve(__global struct gloop *loop, __global struct state *states, ...) {
//     __local uint told;
//     uint block;
//     while ((block = gloop_begin(loop, &told)) != GLOOP_NONE) {
//       uint i = states[block].i;
//       int stopped = 0;
//       while (i < COUNT && !stopped) {
//         work(...);
//         ++i;
//         stopped = gloop_poll(loop, &told);
//       }
//       if (get_local_id(0) == 0) states[block].i = i;
//       gloop_end(loop, block, stopped);
//     }
//   }
//
// All work-items of a group must call these functions, which contain barriers. A logical block is one
// that the host counts; its number replaces get_group_id.
#ifndef GLOOP_CL_H
#define GLOOP_CL_H

#define GLOOP_NONE 0xffffffffu

// A device without this scope has no memory of its own: its own scope reaches the host.
#if __OPENCL_C_VERSION__ >= 300 && !defined(__opencl_c_atomic_scope_all_devices)
#define GLOOP_HOST memory_scope_device
#else
#define GLOOP_HOST memory_scope_all_svm_devices
#endif

// Words that host and device share, initially all zero except the two counts and the list.
struct gloop {
  atomic_uint stop;       // written by the host: nonzero to stop
  atomic_uint next;       // the next logical block that has not begun
  atomic_uint suspended;  // the length of the list of suspended blocks
  atomic_uint done;       // logical blocks that are done
  uint blocks;            // logical blocks
  uint ready;             // the number of them that this launch has to run: the list's first half
  uint reserved[2];
  // The suspended blocks: `blocks` words, and as many for the next launch.
  uint list[];
};

static inline int gloop_leader(void) {
  return (get_local_id(0) | get_local_id(1) | get_local_id(2)) == 0;
}

// Whether to stop. The same for all work-items of the group.
static inline int gloop_poll(__global struct gloop *loop, __local uint *told) {
  if (gloop_leader())
    *told = atomic_load_explicit(&loop->stop, memory_order_relaxed, GLOOP_HOST);
  barrier(CLK_LOCAL_MEM_FENCE);
  const uint stop = *told;
  barrier(CLK_LOCAL_MEM_FENCE);
  return stop != 0;
}

// A logical block to run: one that was suspended before, or a new one; GLOOP_NONE to return. Blocks
// that were suspended in the last launch are in the list's first half, to which the host moves those
// of the second half.
static inline uint gloop_begin(__global struct gloop *loop, __local uint *told) {
  if (gloop_leader()) {
    uint block = GLOOP_NONE;
    if (!atomic_load_explicit(&loop->stop, memory_order_relaxed, GLOOP_HOST)) {
      const uint number =
          atomic_fetch_add_explicit(&loop->next, 1, memory_order_relaxed, memory_scope_device);
      if (number < loop->ready) block = loop->list[number];
    }
    *told = block;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  const uint block = *told;
  barrier(CLK_LOCAL_MEM_FENCE);
  return block;
}

// The block is done, or continues in a later launch. What it needs then is in global memory.
static inline void gloop_end(__global struct gloop *loop, uint block, int stopped) {
  barrier(CLK_GLOBAL_MEM_FENCE);
  if (gloop_leader()) {
    if (!stopped) {
      atomic_fetch_add_explicit(&loop->done, 1, memory_order_relaxed, memory_scope_device);
    } else {
      const uint place =
          atomic_fetch_add_explicit(&loop->suspended, 1, memory_order_relaxed, memory_scope_device);
      if (place < loop->blocks) loop->list[loop->blocks + place] = block;
    }
  }
}

#endif
