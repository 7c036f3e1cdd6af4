// Runs every block of decode_portable.cu, or of decode_round.cu, given what a launch is given (test_decode_kernel.py,
// test_decode_round.py). KERNEL: the file's name and its kernel's.

#define TEXT(name) #name
#define FILE_OF(name) TEXT(name.cu)
#include FILE_OF(KERNEL)

static Arguments arguments;

static void thread() {
  KERNEL(arguments);
  fibers[current].done = true;
  go(fibers[current].place, scheduler);
}

static void block(int at, int threads, int bytes) {
  blockIdx.x = at;
  run_block(threads);
  for (int at = bytes; at < (int)sizeof shared; ++at)
    if (shared[at] != blank) fail("more shared memory than the launch has");
}

// `step`: blocks, with clusters those, come in steps of so many, round and round; it divides nothing of their number.
extern "C" void run(const Arguments* given, int blocks, int threads, int bytes, int step) {
  arguments = *given;
  readable = {{nullptr, (size_t)-1}};  // the sizes of tensors are not known here
  const int together = PORTABLE ? 1 : SIZE, groups = blocks / together;
  for (int i = 0; i < groups; ++i) {
    const int first = (long long)i * step % groups * together;
    for (auto& letters : mail_of) letters.clear();
    for (int turn = 0; turn < (PORTABLE ? 1 : 2); ++turn) {
      delivered = turn == 1;
      for (int rank = 0; rank < together; ++rank) block(first + rank, threads, bytes);
    }
  }
}
