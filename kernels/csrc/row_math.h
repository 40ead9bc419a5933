// The maths of one row of logits, for the device (nvcc) and the host (g++, where its values are tested).
//
// With z the logits, m their maximum, T the temperature, y the target and t_j = (z_j - m) log2(e) / T:
//
//     s = sum_j 2^t_j        w = sum_j 2^t_j t_j
//     logprob = (z_y - m) / T - ln s          entropy = ln s - ln(2) w / s
//     dL/dz_j = 2^t_j (base + slope t_j),     base  = -(g + h (H - ln s)) / (T s),   slope = -h ln(2) / (T s)
//     dL/dz_y = g (1 - p_y) / T - h p_y (ln p_y + H) / T
//
// with g = dL/dlogprob and h = dL/dentropy of the token objective (grpo_kernels/objective.py, followed line by line).
// Base 2, because the hardware's exponential is: one multiplication a logit less than with e.
//
// The passes leave the target out, and it joins in finish_row: s = 2^t_y + rest. Where it is the maximum its log-prob
// is -log1p(rest), which keeps its digits as p -> 1; next to the 1 in s a rest of 1e-8 would be lost, and with it the
// row's whole gradient.
#pragma once

#include <math.h>

#include "grpo_rows.h"

// 2^t is 0 in float32 far before this. t is cut here where it is multiplied by 2^t, so that 0 * -inf never occurs;
// the exponential sees the uncut t, so that a NaN stays one (fmaxf drops it).
#define GRPO_MIN_T -1000.0f
#define GRPO_LN2 0.693147180559945309f
#define GRPO_MAX_LOG_RATIO 20.0f

GRPO_HD float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;  // one instruction, at most 2 ulp off, 2^0 exactly 1; results below 2^-126 become 0
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// Of a part of a row: maximum m, s and w above, both relative to m. Nothing seen: {-inf, 0, 0}.
struct Statistics {
  float maximum, sum, weighted;
};

GRPO_HD Statistics no_statistics() { return Statistics{-INFINITY, 0.0f, 0.0f}; }

// What logits are shifted by: -inf - -inf would be NaN, so a part with nothing finite is shifted by 0 and all its
// exponentials are 0.
GRPO_HD float finite_origin(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

GRPO_HD void raise_maximum(Statistics& part, float maximum, float scale) {
  const float t = (part.maximum - finite_origin(maximum)) * scale;  // -inf where nothing was seen: 2^t = 0
  const float factor = exp2_fast(t);
  part.weighted = factor * (part.weighted + part.sum * fmaxf(t, GRPO_MIN_T));
  part.sum *= factor;
  part.maximum = maximum;
}

GRPO_HD Statistics merge(Statistics a, Statistics b, float scale) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  raise_maximum(a, maximum, scale);
  raise_maximum(b, maximum, scale);
  return Statistics{maximum, a.sum + b.sum, a.weighted + b.weighted};
}

// COUNT logits at once: one rescaling for all of them instead of one each.
template <int COUNT>
GRPO_HD void push(Statistics& part, const float (&logits)[COUNT], float scale) {
  float maximum = part.maximum;
  GRPO_UNROLL
  for (int i = 0; i < COUNT; ++i) maximum = fmaxf(maximum, logits[i]);
  raise_maximum(part, maximum, scale);
  const float origin = finite_origin(maximum);
  GRPO_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    const float t = (logits[i] - origin) * scale;  // subtracted first: a common offset of 1e4 costs no digits
    const float power = exp2_fast(t);
    part.sum += power;
    part.weighted += power * fmaxf(t, GRPO_MIN_T);
  }
}

struct TokenInputs {
  float target_logit, advantage, weight, old, ref, sampler;
};

struct TokenTerms {
  float stats[GRPO_STATS];
  int clipped;
  float grad_logprob, grad_entropy;
};

// torch's clamp keeps a NaN; fminf would not.
GRPO_HD float at_most(float x, float high) { return x > high ? high : x; }
GRPO_HD float at_least(float x, float low) { return x < low ? low : x; }

// Surrogate S and dS/dlogprob.
GRPO_HD void surrogate_terms(
    const GrpoRowsArgs& args, float ratio, float ratio_slope, float advantage, float logprob, float& value,
    float& slope) {
  if (args.surrogate == GRPO_CISPO) {
    slope = at_most(ratio, args.ratio_high) * advantage;
    value = slope * logprob;
  } else if (args.surrogate == GRPO_SAPO) {
    const float tau = advantage > 0 ? args.tau_positive : args.tau_negative;
    const float gate = 1.0f / (1.0f + expf(-tau * (ratio - 1.0f)));
    value = 4.0f / tau * gate * advantage;
    slope = 4.0f * gate * (1.0f - gate) * advantage * ratio_slope;
  } else {
    const float inside = (advantage < 0 ? at_most(ratio, args.delta) : ratio) * advantage;
    const float outside = at_most(at_least(ratio, args.ratio_low), args.ratio_high) * advantage;
    value = inside <= outside || inside != inside ? inside : outside;
    // A ratio exactly on a bound counts as inside.
    const bool moves = inside <= outside && (advantage >= 0 || ratio <= args.delta);
    slope = moves ? advantage * ratio_slope : 0.0f;
  }
}

GRPO_HD float mismatch_weight(const GrpoRowsArgs& args, float old, float sampler) {
  const float weight = expf(old - sampler);
  if (args.mismatch == GRPO_TOKEN_CLIP) return at_most(weight, args.mismatch_cap);
  return weight > args.mismatch_cap ? 0.0f : weight;
}

// Estimate of the KL in the loss and its derivative; k3 and its derivative are given.
GRPO_HD void kl_terms(
    const GrpoRowsArgs& args, float gap, float k3, float k3_slope, float ratio, float ratio_slope, float& value,
    float& slope) {
  switch (args.kl_estimator) {
    case GRPO_K1: value = -gap; slope = 1.0f; break;
    case GRPO_K2: value = 0.5f * gap * gap; slope = -gap; break;
    case GRPO_K3: value = k3; slope = k3_slope; break;
    case GRPO_K3_RATIO: value = ratio * k3; slope = ratio_slope * k3 + ratio * k3_slope; break;
    default: value = 0.0f; slope = 0.0f;
  }
}

// objective.token_terms for one token.
GRPO_HD TokenTerms token_terms(const GrpoRowsArgs& args, const TokenInputs& in, float logprob, float entropy) {
  TokenTerms out;
  // An untrained token is zeroed before exp, never multiplied away after it.
  const bool trained = in.weight != 0;
  const float advantage = trained ? in.advantage : 0.0f;
  logprob = trained ? logprob : 0.0f;
  entropy = trained ? entropy : 0.0f;
  const bool has_old = args.old_logprobs != nullptr;
  const float old = has_old ? (trained ? in.old : 0.0f) : logprob;

  const float log_ratio = has_old ? logprob - old : 0.0f;
  const float ratio = expf(at_least(at_most(log_ratio, GRPO_MAX_LOG_RATIO), -GRPO_MAX_LOG_RATIO));
  const float ratio_slope = fabsf(log_ratio) <= GRPO_MAX_LOG_RATIO ? ratio : 0.0f;
  float surrogate, slope;
  surrogate_terms(args, ratio, ratio_slope, advantage, logprob, surrogate, slope);

  float weight = 1.0f;
  if (args.sampler_logprobs != nullptr && args.mismatch != GRPO_MISMATCH_NONE && trained) {
    weight = mismatch_weight(args, old, in.sampler);
  }
  float loss = -weight * surrogate, grad = -weight * slope, k3 = 0.0f;
  if (args.ref_logprobs != nullptr) {
    const float gap = (trained ? in.ref : 0.0f) - logprob;
    const float cut = at_most(gap, GRPO_MAX_LOG_RATIO);
    const float growth = expm1f(cut);
    k3 = growth - cut;
    float value, kl_slope;
    kl_terms(args, gap, k3, gap <= GRPO_MAX_LOG_RATIO ? -growth : 0.0f, ratio, ratio_slope, value, kl_slope);
    loss += args.beta * value;
    grad += args.beta * kl_slope;
  }
  loss -= args.entropy_coef * entropy;

  out.stats[GRPO_LOSS] = trained ? in.weight * loss : 0.0f;
  out.stats[GRPO_LOGPROB] = logprob;
  out.stats[GRPO_ENTROPY] = entropy;
  out.stats[GRPO_RATIO] = ratio;
  out.stats[GRPO_KL] = k3;
  out.stats[GRPO_SURROGATE] = surrogate;
  out.stats[GRPO_WEIGHT] = weight;
  out.clipped = (ratio < args.ratio_low && advantage < 0 ? 1 : 0) + (ratio > args.ratio_high && advantage > 0 ? 2 : 0) +
                (ratio > args.delta && advantage < 0 ? 4 : 0);
  out.grad_logprob = trained ? in.weight * grad : 0.0f;
  out.grad_entropy = -args.entropy_coef * in.weight;
  return out;
}

// What the second pass over a row needs.
struct RowGradient {
  float origin, base, slope;  // dz_j = 2^t_j (base + slope t_j)
  float target;               // dz_y
  int idle;                   // both upstream gradients are 0: the row becomes 0 whatever it holds
};

// From the statistics of a row without its target to the token's outputs and its gradient.
GRPO_HD RowGradient finish_row(const GrpoRowsArgs& args, const TokenInputs& in, Statistics rest, TokenTerms& terms) {
  Statistics target{in.target_logit, 1.0f, 0.0f};
  const float maximum = fmaxf(rest.maximum, target.maximum);
  raise_maximum(rest, maximum, args.base2_scale);
  raise_maximum(target, maximum, args.base2_scale);
  const Statistics row{maximum, rest.sum + target.sum, rest.weighted + target.weighted};
  // At most 0: the sum holds 2^0 = 1 of the maximum. A row of -inf: -inf - -inf = NaN.
  const float shifted = (in.target_logit - maximum) * args.inverse_temperature;
  const float log_sum = shifted == 0 ? log1pf(rest.sum) : logf(row.sum);
  const float logprob = shifted - log_sum;
  const float entropy = log_sum - GRPO_LN2 * row.weighted / row.sum;
  terms = token_terms(args, in, logprob, entropy);

  const float grad = terms.grad_logprob * args.inverse_temperature;
  const float grad_entropy = args.entropy_coef != 0 ? terms.grad_entropy * args.inverse_temperature : 0.0f;
  RowGradient out;
  out.origin = row.maximum;
  out.base = -(grad + grad_entropy * (entropy - log_sum)) / row.sum;
  out.slope = -grad_entropy * GRPO_LN2 / row.sum;
  // 1 - p rounded once: 1 - exp(logprob) has lost every digit at p = 1 - 1e-8.
  out.target = -grad * expm1f(logprob);
  if (args.entropy_coef != 0) {
    // Cut like t, for a target of -inf: p ln p is 0 there.
    const float target_shift = at_least(shifted, GRPO_MIN_T) + (entropy - log_sum);
    out.target -= grad_entropy * expf(logprob) * target_shift;
  }
  out.idle = grad == 0 && grad_entropy == 0;
  return out;
}

// ENTROPY false: slope is 0, two instructions less.
template <bool ENTROPY>
GRPO_HD float logit_gradient(const RowGradient& row, float logit, float scale) {
  const float t = (logit - row.origin) * scale;
  const float power = exp2_fast(t);
  return ENTROPY ? power * (row.base + row.slope * fmaxf(t, GRPO_MIN_T)) : power * row.base;
}
