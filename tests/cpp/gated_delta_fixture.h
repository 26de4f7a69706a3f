// Calls of the gated delta rule and of the convolution for tests: poisoned outputs, awkward
// strides, and the answers in double, by the recurrence.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kvspan/causal_conv1d.h"
#include "kvspan/gated_delta.h"
#include "test_tensor.h"

namespace kvspan::test {

// float32, bfloat16 or float16 elements, and what they are in double.
struct Numbers {
  Numbers(std::size_t size, DType type) : dtype(type), bytes(size * type.size_bytes(), 0xff) {}

  double get(std::int64_t i) const {
    if (dtype == kFloat32) {
      float value;
      std::memcpy(&value, &bytes[4 * i], 4);
      return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, &bytes[2 * i], 2);
    if (dtype == kBFloat16) {
      const std::uint32_t wide = std::uint32_t{bits} << 16;
      float value;
      std::memcpy(&value, &wide, 4);
      return value;
    }
    const int exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
    const double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == 31) return std::numeric_limits<double>::quiet_NaN();
    return sign * std::ldexp(mantissa + (exponent ? 1024 : 0), std::max(exponent, 1) - 25);
  }

  // Cut to the type's mantissa; values of the tests are normal numbers of each.
  void set(std::int64_t i, float value) {
    std::uint32_t u;
    std::memcpy(&u, &value, 4);
    if (dtype == kFloat32) {
      std::memcpy(&bytes[4 * i], &u, 4);
      return;
    }
    std::uint16_t bits = static_cast<std::uint16_t>(u >> 16);
    if (dtype == kFloat16) {
      const int exponent = static_cast<int>(u >> 23 & 0xff) - 112;
      const std::uint32_t magnitude =
          exponent <= 0 ? 0 : static_cast<std::uint32_t>(exponent) << 10 | (u >> 13 & 0x3ff);
      bits = static_cast<std::uint16_t>((u >> 16 & 0x8000) | magnitude);
    }
    std::memcpy(&bytes[2 * i], &bits, 2);
  }

  // Half a unit in the last place, relative.
  double half_place() const {
    return dtype == kFloat32 ? 0x1p-24 : dtype == kBFloat16 ? 0x1p-8 : 0x1p-11;
  }

  DType dtype;
  std::vector<std::uint8_t> bytes;
};

struct GatedDeltaCase {
  DType dtype = kFloat32;
  std::int64_t num_key_heads = 1, num_value_heads = 2, key_dim = 16, value_dim = 16;
  std::vector<std::int64_t> lengths{65};
  bool is_vk = false;
  bool has_state = true;
  bool l2norm = true;
};

inline std::string name_of(const GatedDeltaCase& c) {
  std::string name = to_string(c.dtype) + "_" + std::to_string(c.num_key_heads) + "x" +
                     std::to_string(c.num_value_heads) + "_" + std::to_string(c.key_dim) + "x" +
                     std::to_string(c.value_dim) + (c.is_vk ? "_vk" : "_kv") +
                     (c.has_state ? "" : "_fresh") + (c.l2norm ? "" : "_raw");
  for (const std::int64_t length : c.lengths) name.append("_").append(std::to_string(length));
  return name;
}

class GatedDeltaFixture {
 public:
  explicit GatedDeltaFixture(const GatedDeltaCase& c)
      : case_(c), cu_seqlens_{0}, row_(c.is_vk ? c.key_dim : c.value_dim) {
    for (const std::int64_t length : c.lengths) cu_seqlens_.push_back(cu_seqlens_.back() + length);
    const std::int64_t tokens = cu_seqlens_.back();
    q_ = random(tokens * c.num_key_heads * c.key_dim, c.dtype);
    k_ = random(tokens * c.num_key_heads * c.key_dim, c.dtype);
    for (std::int64_t i = 0; !c.l2norm && i < tokens * c.num_key_heads * c.key_dim; ++i) {
      k_.set(i, static_cast<float>(0.3 * k_.get(i)));  // longer than sqrt(2), updates would grow
    }
    v_ = random(tokens * c.num_value_heads * c.value_dim, c.dtype);
    g_ = random(tokens * c.num_value_heads, kFloat32);
    beta_ = random(tokens * c.num_value_heads, kFloat32);
    for (std::int64_t i = 0; i < tokens * c.num_value_heads; ++i) {
      g_.set(i, static_cast<float>(-0.2 * std::abs(g_.get(i))));
      beta_.set(i, static_cast<float>(2.0 / (1.0 + std::exp(-beta_.get(i)))));
    }
    const auto states = static_cast<std::int64_t>(c.lengths.size()) * c.num_value_heads;
    initial_ = random(states * c.key_dim * c.value_dim, kFloat32);
    // Rows of final states have a gap.
    final_ = Numbers(states * (c.is_vk ? c.value_dim : c.key_dim) * (row_ + 3), kFloat32);
    out_ = Numbers(v_.bytes.size() / c.dtype.size_bytes(), c.dtype);
    expect();
  }

  GatedDeltaArgs args(bool has_queries) {
    const GatedDeltaCase& c = case_;
    const std::int64_t tokens = cu_seqlens_.back();
    const auto sequences = static_cast<std::int64_t>(c.lengths.size());
    const std::vector<std::int64_t> state{sequences, c.num_value_heads,
                                          c.is_vk ? c.value_dim : c.key_dim, row_};
    GatedDeltaArgs args;
    if (has_queries) {
      args.q = make_view(q_.bytes.data(), c.dtype, {tokens, c.num_key_heads, c.key_dim});
      args.out = make_view(out_.bytes.data(), c.dtype, {tokens, c.num_value_heads, c.value_dim});
    }
    args.k = make_view(k_.bytes.data(), c.dtype, {tokens, c.num_key_heads, c.key_dim});
    args.v = make_view(v_.bytes.data(), c.dtype, {tokens, c.num_value_heads, c.value_dim});
    args.g = make_view(g_.bytes.data(), kFloat32, {tokens, c.num_value_heads});
    args.beta = make_view(beta_.bytes.data(), kFloat32, {tokens, c.num_value_heads});
    if (c.has_state) args.initial_state = make_view(initial_.bytes.data(), kFloat32, state);
    args.final_state =
        make_view(final_.bytes.data(), kFloat32, {state[0], state[1], state[2], row_ + 3});
    args.final_state.shape[3] = row_;
    args.cu_seqlens = cu_seqlens_;
    args.state_layout = c.is_vk ? StateLayout::kValueKey : StateLayout::kKeyValue;
    args.qk_l2norm = c.l2norm;
    args.scale = 0.25f;
    return args;
  }

  const std::vector<std::uint8_t>& state_bytes() const { return final_.bytes; }
  const std::vector<std::uint8_t>& out_bytes() const { return out_.bytes; }

  void expect_matches_reference(bool has_queries) const {
    const GatedDeltaCase& c = case_;
    const std::int64_t rows = static_cast<std::int64_t>(final_.bytes.size()) / 4 / (row_ + 3);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < row_; ++j) {
        ASSERT_NEAR(final_.get(i * (row_ + 3) + j), expected_state_[i * row_ + j],
                    2e-5 * largest_state_)
            << "state row " << i << ", column " << j;
      }
      for (std::int64_t j = row_; j < row_ + 3; ++j) {
        ASSERT_TRUE(std::isnan(final_.get(i * (row_ + 3) + j))) << "written behind row " << i;
      }
    }
    if (!has_queries) return;
    for (std::size_t i = 0; i < expected_out_.size(); ++i) {
      ASSERT_NEAR(out_.get(static_cast<std::int64_t>(i)), expected_out_[i],
                  2e-5 * largest_out_ + out_.half_place() * std::abs(expected_out_[i]))
          << "out row " << static_cast<std::int64_t>(i) / c.value_dim << ", column "
          << static_cast<std::int64_t>(i) % c.value_dim;
    }
  }

 private:
  Numbers random(std::int64_t size, DType dtype) {
    Numbers numbers(static_cast<std::size_t>(size), dtype);
    for (std::int64_t i = 0; i < size; ++i) numbers.set(i, normal_(random_));
    return numbers;
  }

  std::vector<double> row_of(const Numbers& x, std::int64_t token, std::int64_t head) const {
    std::vector<double> row;
    double sum = 1e-6;
    const std::int64_t first = (token * case_.num_key_heads + head) * case_.key_dim;
    for (std::int64_t d = 0; d < case_.key_dim; ++d) {
      row.push_back(x.get(first + d));
      sum += row.back() * row.back();
    }
    for (double& value : row) value /= case_.l2norm ? std::sqrt(sum) : 1.0;
    return row;
  }

  void expect() {
    const GatedDeltaCase& c = case_;
    const std::int64_t dk = c.key_dim, dv = c.value_dim;
    expected_state_.resize(initial_.bytes.size() / 4);
    expected_out_.resize(v_.bytes.size() / c.dtype.size_bytes());
    for (std::size_t n = 0; n < c.lengths.size(); ++n) {
      for (std::int64_t h = 0; h < c.num_value_heads; ++h) {
        const std::int64_t base = (static_cast<std::int64_t>(n) * c.num_value_heads + h) * dk * dv;
        const auto at = [&](std::int64_t d, std::int64_t j) {
          return base + (c.is_vk ? j * dk + d : d * dv + j);
        };
        std::vector<double> s(dk * dv);
        for (std::int64_t d = 0; d < dk; ++d) {
          for (std::int64_t j = 0; c.has_state && j < dv; ++j) {
            s[d * dv + j] = initial_.get(at(d, j));
          }
        }
        for (std::int64_t t = cu_seqlens_[n]; t < cu_seqlens_[n + 1]; ++t) {
          const std::int64_t key_head = h / (c.num_value_heads / c.num_key_heads);
          const auto k = row_of(k_, t, key_head), q = row_of(q_, t, key_head);
          const double alpha = std::exp(g_.get(t * c.num_value_heads + h));
          const double beta = beta_.get(t * c.num_value_heads + h);
          for (std::int64_t j = 0; j < dv; ++j) {
            const std::int64_t value = (t * c.num_value_heads + h) * dv + j;
            double read = 0.0, out = 0.0;
            for (std::int64_t d = 0; d < dk; ++d) read += k[d] * (s[d * dv + j] *= alpha);
            const double x = beta * (v_.get(value) - read);
            for (std::int64_t d = 0; d < dk; ++d) out += q[d] * (s[d * dv + j] += k[d] * x);
            expected_out_[value] = 0.25 * out;
            largest_out_ = std::max(largest_out_, std::abs(0.25 * out));
          }
        }
        for (std::int64_t d = 0; d < dk; ++d) {
          for (std::int64_t j = 0; j < dv; ++j) {
            expected_state_[at(d, j)] = s[d * dv + j];
            largest_state_ = std::max(largest_state_, std::abs(s[d * dv + j]));
          }
        }
      }
    }
  }

  const GatedDeltaCase case_;
  std::vector<std::int64_t> cu_seqlens_;
  const std::int64_t row_;  // of a state
  std::mt19937 random_{7};
  std::normal_distribution<float> normal_;
  Numbers q_{0, kFloat32}, k_{0, kFloat32}, v_{0, kFloat32}, g_{0, kFloat32}, beta_{0, kFloat32};
  Numbers initial_{0, kFloat32}, final_{0, kFloat32}, out_{0, kFloat32};
  std::vector<double> expected_state_, expected_out_;
  double largest_state_ = 1e-3, largest_out_ = 1e-3;
};

}  // namespace kvspan::test
