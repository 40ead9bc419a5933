// The row kernel on the CPU, for tests: the device's threads one after the other, with the same index arithmetic, the
// same order of merges and the same maths. Slow on purpose; grpo_kernels/torch_rows.py is the CPU path.
//
//   g++ -O1 -std=c++17 -shared -fPIC -o libgrpo_rows_host.so grpo_rows_host.cpp

#include <array>
#include <vector>

#include "row_tiles.h"

namespace {

constexpr int64_t DEFAULT_SHARED = 166912;  // sm_80

// Lane 0 of the device's reduce_warp: what shuffles give lanes beyond `distance` never reaches it.
Statistics reduce_warp(Statistics* lanes, float scale) {
  for (int distance = 16; distance > 0; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) lanes[lane] = merge(lanes[lane], lanes[lane + distance], scale);
  }
  return lanes[0];
}

template <int THREADS>
Statistics reduce_block(std::vector<Statistics>& parts, float scale) {
  std::array<Statistics, 32> partial;
  partial.fill(no_statistics());
  for (int warp = 0; warp < THREADS / 32; ++warp) partial[warp] = reduce_warp(&parts[32 * warp], scale);
  return reduce_warp(partial.data(), scale);
}

template <class T, int THREADS, int R>
void one_row(const GrpoRowsArgs& args, int64_t index, int capacity) {
  struct Held {
    Vec16 vectors[R];
  };
  const float scale = args.base2_scale;
  const Row<T> row = row_at<T>(args, index, THREADS * R, capacity);
  const bool trained = args.token_weights[index] != 0;
  const TokenInputs inputs = trained ? token_inputs(args, row, index) : TokenInputs{};
  std::vector<Held> held(THREADS);
  std::vector<Vec16> shared(capacity);
  std::vector<Statistics> parts(THREADS, no_statistics());
  for (int thread = 0; trained && thread < THREADS; ++thread) {
    parts[thread] = read_row<T, THREADS>(row, thread, held[thread].vectors, shared.data(), scale);
  }
  TokenTerms terms;
  const RowGradient gradient = finish_row(args, inputs, reduce_block<THREADS>(parts, scale), terms);
  store_terms(args, index, terms);
  for (int thread = 0; args.backward && thread < THREADS; ++thread) {
    if (!trained || gradient.idle) {
      clear_row<T, THREADS>(row, thread);
      continue;
    }
    if (args.entropy_coef != 0) {
      write_row<T, THREADS, R, true>(row, thread, held[thread].vectors, shared.data(), gradient, scale);
    } else {
      write_row<T, THREADS, R, false>(row, thread, held[thread].vectors, shared.data(), gradient, scale);
    }
    write_target(row, thread, THREADS, gradient);
  }
}

template <class T, int VARIANT>
void all_rows(const GrpoRowsArgs& args, int64_t limit) {
  constexpr Variant variant = VARIANTS[VARIANT];
  const int capacity = int(shared_capacity(variant, args.vocab / T::PER_VECTOR, limit));
  for (int64_t index = 0; index < args.rows; ++index) {
    one_row<T, variant.threads, variant.registers>(args, index, capacity);
  }
}

template <class T>
void run_variant(const GrpoRowsArgs& args, int variant, int64_t limit) {
  switch (variant) {
    case 0: return all_rows<T, 0>(args, limit);
    case 1: return all_rows<T, 1>(args, limit);
    case 2: return all_rows<T, 2>(args, limit);
    default: return all_rows<T, 3>(args, limit);
  }
}

constexpr int HOST_VARIANTS = int(sizeof(VARIANTS) / sizeof(VARIANTS[0]));

}  // namespace

extern "C" {

int grpo_rows(const GrpoRowsArgs* args) {
  const int64_t limit = args->shared_limit > 0 ? args->shared_limit : DEFAULT_SHARED;
  int variant = args->variant;
  const int code = choose(args->rows, args->vocab, args->row_stride, args->dtype, limit, HOST_VARIANTS, &variant);
  if (code) return code;
  if (args->dtype == GRPO_FLOAT32) run_variant<Float32>(*args, variant, limit);
  if (args->dtype == GRPO_BFLOAT16) run_variant<Bfloat16>(*args, variant, limit);
  if (args->dtype == GRPO_FLOAT16) run_variant<Float16>(*args, variant, limit);
  return 0;
}

const char* grpo_rows_error(int code) { return grpo_own_error(code); }

int grpo_rows_args_size(void) { return int(sizeof(GrpoRowsArgs)); }

int grpo_rows_needs_device(void) { return 0; }

int grpo_rows_plan(int64_t vocab, int32_t dtype, int64_t limit, int32_t variant, GrpoRowsPlan* plan) {
  return plan_row(vocab, dtype, limit, HOST_VARIANTS, variant, plan);
}

}  // extern "C"
