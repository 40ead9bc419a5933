// Where a row lives while a block of threads works on it, and what each thread does with its part. Shared by the device
// kernel and the host library, so that an index off by one shows in the host tests.
//
// A row is `head` columns up to the first 16-byte boundary, `vectors` of 16 bytes, and `tail` columns:
//
//   tier       | vectors                                 | traffic of global memory
//   registers  | the first R * THREADS, R a thread       | one read, one write
//   shared     | the next ones, as many as fit           | one read, one write
//   streamed   | what is left                            | two reads, one write
//   scalar     | head and tail, at most 14 columns       | two reads, one write
//
// Vector v belongs to thread v mod THREADS in every tier: the threads of a warp touch 512 consecutive bytes, and a
// thread meets only its own vectors in shared memory, so that no barrier stands between loading and using them.
//
// The headline row, 151936 bfloat16 columns = 303872 bytes = 18992 vectors, 512 threads. A register tier of R vectors
// costs 4 R of the 128 registers that 65536 / 512 leave a thread, and holds 8192 R bytes:
//
//   architecture | shared of a block        | R  | registers  | shared     | streamed
//   sm_80        | 163 KB = 166912 bytes    | 17 | 139264     | 164608     | 0
//   sm_90        | 227 KB = 232448 bytes    | 9  | 73728      | 230144     | 0
//
// Such a block has an SM for itself. Its loads overlap its own statistics, its stores its own gradients; only the
// reduction in between leaves memory idle. Rows that fit in half an SM (R = 4, 64 registers: 32768 bytes + half of the
// shared memory) run two to an SM, so that one loads while the other reduces. These are arguments, not measurements.
#pragma once

#include "logit_types.h"
#include "row_math.h"

// Static shared memory of the kernel (partial statistics, token inputs, gradient) is below this.
#define GRPO_STATIC_SHARED 512
// What the hardware keeps of an SM's shared memory for each block.
#define GRPO_BLOCK_RESERVED 1024

struct Variant {
  int threads, registers, blocks_per_sm;
};

// One line for each kernel that is compiled. The last exists on the host alone: small enough that rows of a few hundred
// columns reach every tier.
constexpr Variant VARIANTS[] = {{512, 4, 2}, {512, 9, 1}, {512, 17, 1}, {32, 2, 1}};
constexpr int DEVICE_VARIANTS = 3;

// Bytes of dynamic shared memory that a block of this variant may use of `limit`, what one block alone may have.
inline int64_t shared_budget(const Variant& variant, int64_t limit) {
  const int64_t each = (limit + GRPO_BLOCK_RESERVED) / variant.blocks_per_sm - GRPO_BLOCK_RESERVED;
  return (each - GRPO_STATIC_SHARED) / 16 * 16;
}

// Vectors of shared memory that a row of `vectors` needs; the budget caps it.
inline int64_t shared_capacity(const Variant& variant, int64_t vectors, int64_t limit) {
  const int64_t beyond = vectors - int64_t(variant.threads) * variant.registers;
  const int64_t budget = shared_budget(variant, limit) / 16;
  return beyond <= 0 ? 0 : beyond < budget ? beyond : budget;
}

// The first variant that holds the whole row, else the one that holds most.
inline int choose_variant(int64_t vectors, int64_t limit) {
  for (int i = 0; i < DEVICE_VARIANTS; ++i) {
    const int64_t in_registers = int64_t(VARIANTS[i].threads) * VARIANTS[i].registers;
    const int64_t budget = shared_budget(VARIANTS[i], limit);
    if (budget >= 0 && vectors <= in_registers + budget / 16) return i;
  }
  return DEVICE_VARIANTS - 1;
}

inline int64_t vectors_of(int64_t vocab, int32_t dtype) { return vocab / (dtype == GRPO_FLOAT32 ? 4 : 8); }

// What grpo_rows and grpo_rows_plan check and choose. 0 or a GrpoError.
inline int choose(
    int64_t rows, int64_t vocab, int64_t stride, int32_t dtype, int64_t limit, int variants, int* variant) {
  if (dtype < GRPO_FLOAT32 || dtype > GRPO_FLOAT16) return GRPO_BAD_DTYPE;
  if (rows < 0 || rows >> 31 || vocab < 1 || vocab >> 31 || stride < vocab) return GRPO_BAD_SIZE;
  if (*variant == -1) *variant = choose_variant(vectors_of(vocab, dtype), limit);
  if (*variant < 0 || *variant >= variants) return GRPO_BAD_VARIANT;
  return shared_budget(VARIANTS[*variant], limit) < 0 ? GRPO_BAD_SHARED : 0;
}

inline int plan_row(int64_t vocab, int32_t dtype, int64_t limit, int variants, int variant, GrpoRowsPlan* plan) {
  const int code = choose(1, vocab, vocab, dtype, limit, variants, &variant);
  if (code) return code;
  const Variant& chosen = VARIANTS[variant];
  const int64_t vectors = vectors_of(vocab, dtype), most = int64_t(chosen.threads) * chosen.registers;
  const int64_t in_registers = vectors < most ? vectors : most, in_shared = shared_capacity(chosen, vectors, limit);
  const int64_t item = dtype == GRPO_FLOAT32 ? 4 : 2;
  *plan = {variant, chosen.threads, 16 * in_registers, 16 * in_shared, 16 * (vectors - in_registers - in_shared),
           vocab * item - 16 * vectors};
  return 0;
}

template <class T>
struct Row {
  typename T::Bits* columns;  // of the row's column 0
  Vec16* body;                // of its first vector
  int head, vectors, tail;
  int shared;         // vectors in shared memory
  int target;         // column, or -1 where it is outside the vocabulary
  int target_vector;  // which vector of the body holds it, or -1
};

template <class T>
GRPO_HD Row<T> row_at(const GrpoRowsArgs& args, int64_t row, int in_registers, int capacity) {
  Row<T> out;
  out.columns = static_cast<typename T::Bits*>(args.logits) + row * args.row_stride;  // 64-bit: N * V passes 2^31
  const int vocab = int(args.vocab);
  const int misaligned = int(reinterpret_cast<uintptr_t>(out.columns) & 15u) / int(sizeof(typename T::Bits));
  const int head = misaligned ? T::PER_VECTOR - misaligned : 0;
  out.head = head < vocab ? head : vocab;
  out.vectors = (vocab - out.head) / T::PER_VECTOR;
  out.tail = vocab - out.head - out.vectors * T::PER_VECTOR;
  out.body = reinterpret_cast<Vec16*>(out.columns + out.head);
  const int beyond = out.vectors - in_registers;
  out.shared = beyond <= 0 ? 0 : beyond < capacity ? beyond : capacity;
  const int64_t target = args.targets[row];
  out.target = target < 0 || target >= args.vocab ? -1 : int(target);
  const int in_body = out.target - out.head;
  out.target_vector = in_body >= 0 && in_body < out.vectors * T::PER_VECTOR ? in_body / T::PER_VECTOR : -1;
  return out;
}

// The thread's column of head and tail, or -1.
template <class T>
GRPO_HD int scalar_column(const Row<T>& row, int thread) {
  if (thread < row.head) return thread;
  return thread < row.head + row.tail ? thread + row.vectors * T::PER_VECTOR : -1;
}

// The thread that writes the target's column.
template <class T>
GRPO_HD int target_owner(const Row<T>& row, int threads) {
  if (row.target_vector >= 0) return row.target_vector % threads;
  return row.target < row.head ? row.target : row.target - row.vectors * T::PER_VECTOR;
}

GRPO_HD Vec16 load_vector(const Vec16* from) {
#if defined(__CUDA_ARCH__)
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  return Vec16{{bits.x, bits.y, bits.z, bits.w}};
#else
  return *from;
#endif
}

GRPO_HD void store_vector(Vec16* to, const Vec16& value) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<uint4*>(to) = make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
#else
  *to = value;
#endif
}

// Global to shared memory without a register in between and without waiting: all of a row is in flight at once.
GRPO_HD void copy_async(Vec16* shared, const Vec16* global) {
#if defined(__CUDA_ARCH__)
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  *shared = *global;
#endif
}

GRPO_HD void wait_for_copies() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");  // the thread's own copies: it reads no other's
#endif
}

// The target, out of the statistics until finish_row: -inf adds nothing. One comparison a vector; the branch is taken
// once a row. What the second pass makes of the column is overwritten by write_target.
template <class T>
GRPO_HD void drop_target(const Row<T>& row, Vec16& vector, int index) {
  if (index != row.target_vector) return;
  const int element = (row.target - row.head) % T::PER_VECTOR;
  uint32_t mask = 0xffffffffu;
  if (T::PER_VECTOR == 8) mask = element % 2 ? 0xffff0000u : 0x0000ffffu;
  GRPO_UNROLL
  for (int i = 0; i < 4; ++i) {  // a select, not an index known at run time: that would move the vector to the stack
    const uint32_t drop = i == element / (T::PER_VECTOR / 4) ? mask : 0u;
    vector.words[i] = (vector.words[i] & ~drop) | (T::MINUS_INFINITY & drop);
  }
}

template <class T>
GRPO_HD void push_vector(Statistics& part, const Vec16& vector, float scale) {
  float values[T::PER_VECTOR];
  unpack_vector<T>(vector, values);
  push(part, values, scale);
}

// First pass: the thread's share of the row into registers and shared memory, and its statistics.
template <class T, int THREADS, int R>
GRPO_HD Statistics read_row(const Row<T>& row, int thread, Vec16 (&held)[R], Vec16* shared, float scale) {
  const int beyond = row.vectors - R * THREADS;  // vectors in shared memory and streamed
  const Vec16* rest = row.body + R * THREADS;
  GRPO_UNROLL
  for (int r = 0; r < R; ++r) {
    // A vector beyond the row is -inf, which adds nothing: no branch in the arithmetic.
    const int index = r * THREADS + thread;
    held[r] = index < row.vectors ? load_vector(row.body + index) : minus_infinity_vector<T>();
  }
  // After the loads into registers, whose statistics come first: memory answers roughly in order.
  int v = thread;
  for (; v < row.shared; v += THREADS) copy_async(shared + v, rest + v);
  Statistics part = no_statistics();
  GRPO_UNROLL
  for (int r = 0; r < R; ++r) {
    drop_target(row, held[r], r * THREADS + thread);
    push_vector<T>(part, held[r], scale);
  }
  for (; v < beyond; v += THREADS) {
    Vec16 vector = load_vector(rest + v);
    drop_target(row, vector, R * THREADS + v);
    push_vector<T>(part, vector, scale);
  }
  wait_for_copies();
  for (v = thread; v < row.shared; v += THREADS) {
    Vec16 vector = shared[v];
    drop_target(row, vector, R * THREADS + v);
    push_vector<T>(part, vector, scale);
  }
  const int column = scalar_column(row, thread);
  if (column >= 0 && column != row.target) {
    const float logit[1] = {T::load(row.columns[column])};
    push(part, logit, scale);
  }
  return part;
}

template <class T, bool ENTROPY>
GRPO_HD void store_gradient(Vec16* to, const Vec16& logits, const RowGradient& gradient, float scale) {
  float values[T::PER_VECTOR];
  unpack_vector<T>(logits, values);
  GRPO_UNROLL
  for (int i = 0; i < T::PER_VECTOR; ++i) values[i] = logit_gradient<ENTROPY>(gradient, values[i], scale);
  store_vector(to, pack_vector<T>(values));
}

// Second pass: the gradient over the logits, each thread over what it read.
template <class T, int THREADS, int R, bool ENTROPY>
GRPO_HD void write_row(
    const Row<T>& row, int thread, const Vec16 (&held)[R], const Vec16* shared, const RowGradient& gradient,
    float scale) {
  GRPO_UNROLL
  for (int r = 0; r < R; ++r) {
    const int index = r * THREADS + thread;
    if (index < row.vectors) store_gradient<T, ENTROPY>(row.body + index, held[r], gradient, scale);
  }
  const int beyond = row.vectors - R * THREADS;
  Vec16* rest = row.body + R * THREADS;
  int v = thread;
  for (; v < row.shared; v += THREADS) store_gradient<T, ENTROPY>(rest + v, shared[v], gradient, scale);
  for (; v < beyond; v += THREADS) store_gradient<T, ENTROPY>(rest + v, load_vector(rest + v), gradient, scale);
  const int column = scalar_column(row, thread);
  if (column >= 0) {
    row.columns[column] = T::store(logit_gradient<ENTROPY>(gradient, T::load(row.columns[column]), scale));
  }
}

// The target's column once more, by the thread that has just written it, so that the order is the program's.
template <class T>
GRPO_HD void write_target(const Row<T>& row, int thread, int threads, const RowGradient& gradient) {
  if (row.target >= 0 && target_owner(row, threads) == thread) row.columns[row.target] = T::store(gradient.target);
}

// A row without gradient, NaN or not.
template <class T, int THREADS>
GRPO_HD void clear_row(const Row<T>& row, int thread) {
  for (int v = thread; v < row.vectors; v += THREADS) store_vector(row.body + v, Vec16{{0u, 0u, 0u, 0u}});
  const int column = scalar_column(row, thread);
  if (column >= 0) row.columns[column] = 0;
}

// All that is known of a row's token but its logits. A target outside the vocabulary makes the row NaN.
template <class T>
GRPO_HD TokenInputs token_inputs(const GrpoRowsArgs& args, const Row<T>& row, int64_t index) {
  TokenInputs in;
  in.target_logit = row.target < 0 ? NAN : T::load(row.columns[row.target]);
  in.advantage = args.advantages[index];
  in.weight = args.token_weights[index];
  in.old = args.old_logprobs ? args.old_logprobs[index] : 0.0f;
  in.ref = args.ref_logprobs ? args.ref_logprobs[index] : 0.0f;
  in.sampler = args.sampler_logprobs ? args.sampler_logprobs[index] : 0.0f;
  return in;
}

GRPO_HD void store_terms(const GrpoRowsArgs& args, int64_t index, const TokenTerms& terms) {
  GRPO_UNROLL
  for (int i = 0; i < GRPO_STATS; ++i) args.stats[i * args.rows + index] = terms.stats[i];
  args.clipped[index] = terms.clipped;
}
