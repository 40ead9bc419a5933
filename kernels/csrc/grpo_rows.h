// The C interface of the row kernel: one struct, one call. Plain types only, so that Python binds it with ctypes and
// neither torch's headers nor its ABI are needed. grpo_kernels/cuda_rows.py holds the same struct, field by field.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define GRPO_HD __host__ __device__ __forceinline__
#define GRPO_UNROLL _Pragma("unroll")
#else
#define GRPO_HD inline
#define GRPO_UNROLL
#endif

enum GrpoDtype { GRPO_FLOAT32 = 0, GRPO_BFLOAT16 = 1, GRPO_FLOAT16 = 2 };
enum GrpoSurrogate { GRPO_CLIP = 0, GRPO_CISPO = 1, GRPO_SAPO = 2 };
enum GrpoKl { GRPO_KL_NONE = 0, GRPO_K1 = 1, GRPO_K2 = 2, GRPO_K3 = 3, GRPO_K3_RATIO = 4 };
enum GrpoMismatch { GRPO_MISMATCH_NONE = 0, GRPO_TOKEN_CLIP = 1, GRPO_TOKEN_MASK = 2 };

// Rows of `stats`, in the order of TokenStats.
enum GrpoStat { GRPO_LOSS, GRPO_LOGPROB, GRPO_ENTROPY, GRPO_RATIO, GRPO_KL, GRPO_SURROGATE, GRPO_WEIGHT, GRPO_STATS };

struct GrpoRowsArgs {
  void* logits;                  // [rows, vocab] of `dtype`, overwritten by its gradient where `backward`
  const int64_t* targets;        // [rows]; outside [0, vocab): the row becomes NaN, no memory outside it is touched
  const float* advantages;       // [rows]
  const float* token_weights;    // [rows]
  const float* old_logprobs;     // [rows] or null: the policy's own
  const float* ref_logprobs;     // [rows] or null
  const float* sampler_logprobs; // [rows] or null
  float* stats;                  // out [GRPO_STATS, rows]
  int32_t* clipped;              // out [rows]: bits of TokenStats.clipped
  void* stream;                  // cudaStream_t
  int64_t rows;
  int64_t vocab;        // below 2^31; rows * vocab may be more
  int64_t row_stride;   // elements from one row of logits to the next
  int64_t shared_limit; // bytes of shared memory a block may use; 0: what the device has
  int32_t dtype;
  int32_t surrogate;
  int32_t kl_estimator;
  int32_t mismatch;
  int32_t backward;
  int32_t variant; // index into VARIANTS (row_tiles.h); -1: chosen by row size and shared memory
  float ratio_low;
  float ratio_high;
  float delta; // inf without dual clip
  float tau_positive;
  float tau_negative;
  float beta;
  float entropy_coef;
  float mismatch_cap;
  float inverse_temperature; // 1 / T
  float base2_scale;         // log2(e) / T, rounded once
};

// Where the columns of an aligned row live. Bytes, but for the first two.
struct GrpoRowsPlan {
  int64_t variant, threads, in_registers, in_shared, streamed, scalar;
};

extern "C" {
int grpo_rows(const GrpoRowsArgs* args);  // 0, or a code for grpo_rows_error
const char* grpo_rows_error(int code);    // static text
int grpo_rows_args_size(void);            // sizeof(GrpoRowsArgs): a stale library is refused by it
int grpo_rows_needs_device(void);         // 1: the pointers must be CUDA memory
int grpo_rows_plan(int64_t vocab, int32_t dtype, int64_t shared_limit, int32_t variant, GrpoRowsPlan* plan);
}

// Codes of our own; CUDA's are positive.
enum GrpoError { GRPO_BAD_DTYPE = -1, GRPO_BAD_VARIANT = -2, GRPO_BAD_SIZE = -3, GRPO_BAD_SHARED = -4 };

inline const char* grpo_own_error(int code) {
  switch (code) {
    case GRPO_BAD_DTYPE: return "dtype must be float32, bfloat16 or float16";
    case GRPO_BAD_VARIANT: return "no such kernel variant";
    case GRPO_BAD_SIZE: return "rows and vocab must be below 2^31, row_stride at least vocab";
    case GRPO_BAD_SHARED: return "shared memory limit is too small for this kernel variant or above the device's";
    default: return "unknown error";
  }
}
