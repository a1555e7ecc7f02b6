// The tokens of a row in order of likelihood, without putting them in order.
#pragma once

#include <string.h>

#include <cstdint>
#include <vector>

#include "sampling.h"

namespace castline {

// Orders as (logit descending, id ascending) when sorted from the largest: the logit's bits made monotonic, then the id.
inline uint64_t sort_key(float logit, int32_t id) {
  const float x = logit + 0.0f;  // -0 becomes 0, its equal
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0x7fffffffu - static_cast<uint32_t>(id));
}

inline int32_t id_of(uint64_t key) { return static_cast<int32_t>(0x7fffffffu - static_cast<uint32_t>(key)); }

// A token, by its sort key, and the weight of all tokens up to and with it.
struct Place {
  uint64_t key;
  double weight;
};

// Where along the order the weight reaches a line. A range of logits is narrowed until the token is one of a few, which
// are sorted: the weight from a bound on upwards is one fast pass, over ever fewer tokens. A sample of the row guesses
// the first range. The guess may be wrong: then the range is wide, and the same is found.
class LikelihoodOrder {
 public:
  // Of the tokens that have weight and reach min-p. *row* and *weights*, both [vocab], stay until the last call.
  void start(const SamplingKernels* kernels, const float* row, const float* weights, int vocab, float peak,
             const Choice& choice);

  // The first token up to which the tokens weigh *line*; the last of all where all weigh less.
  Place reaching(double line);

 private:
  // Logits low <= x < high hold the token: what lies *above* them weighs less than the line.
  struct Range {
    float low, high;
    Sum above, from_low;

    int count() const { return from_low.count - above.count; }
    void narrow(double line, float bound, Sum from);
  };
  struct Tokens {
    const float *logits, *weights;
    int count;
  };

  Sum sum_from(const Tokens& tokens, float bound) const;
  void sample();
  Range first_range(double line) const;
  float guess(double line, Range range) const;
  void gather(const Tokens& tokens, const Range& range);

  const SamplingKernels* kernels_ = nullptr;
  Tokens all_{}, sampled_{}, band_{};
  float peak_ = 0, lowest_ = 0;
  Sum total_{};
  double share_ = 0;  // of the sample in the weight of all
  std::vector<float> sampled_logits_, sampled_weights_;
  std::vector<float> logits_, weights_;  // of band_
  std::vector<int32_t> ids_, places_;
  std::vector<uint64_t> keys_;
};

}  // namespace castline
