// Every SHA-256 path of this machine against NIST's vectors (FIPS 180-4 examples, CAVS) and the
// portable one.
#include "kvspan/sha256.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "kvspan/check.h"

namespace kvspan {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

class Sha256Test : public testing::TestWithParam<Sha256Isa> {
 protected:
  std::string hash(const std::string& message) {
    return hex(sha256(bytes_of(message), GetParam()));
  }
};

TEST_P(Sha256Test, EmptyMessage) {
  EXPECT_EQ(hash(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST_P(Sha256Test, Abc) {
  EXPECT_EQ(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST_P(Sha256Test, OneByteMessage) {
  EXPECT_EQ(hash("\xbd"), "68325720aabd7c82f30f554b313d0570c95accbb7dc4b5aae11204c08ffe732b");
}

TEST_P(Sha256Test, Message448Bits) {
  EXPECT_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST_P(Sha256Test, Message896Bits) {
  EXPECT_EQ(hash("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                 "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
}

TEST_P(Sha256Test, MillionTimesA) {
  EXPECT_EQ(hash(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_P(Sha256Test, AgreesWithThePortablePathAtEveryPaddingLength) {
  std::string message(300, '\0');
  std::iota(message.begin(), message.end(), 0);
  for (std::size_t size = 0; size <= message.size(); ++size) {
    const auto part = bytes_of(message).first(size);
    ASSERT_EQ(hex(sha256(part, GetParam())), hex(sha256(part, Sha256Isa::kScalar)))
        << "at " << size << " bytes";
  }
}

TEST_P(Sha256Test, APairIsTwoSingles) {
  const Sha256Code code = sha256_code(GetParam());
  for (const std::size_t num_chunks : {1, 2, 5}) {
    std::vector<std::uint8_t> first(64 * num_chunks), second(64 * num_chunks);
    std::iota(first.begin(), first.end(), 0);
    std::iota(second.begin(), second.end(), 77);
    auto one = kSha256InitialState, two = kSha256InitialState;
    code.compress_pair(one.data(), first.data(), two.data(), second.data(), num_chunks);
    EXPECT_EQ(hex(sha256_digest(one)), hex(sha256_padded(code, first.data(), num_chunks)));
    EXPECT_EQ(hex(sha256_digest(two)), hex(sha256_padded(code, second.data(), num_chunks)));
    EXPECT_NE(one, two);
  }
}

INSTANTIATE_TEST_SUITE_P(AllIsas, Sha256Test, testing::ValuesIn(sha256_isas()),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(Sha256IsaTest, NamesRoundTrip) {
  for (const Sha256Isa isa : sha256_isas()) EXPECT_EQ(parse_sha256_isa(to_string(isa)), isa);
  EXPECT_THROW(parse_sha256_isa("md5"), ArgumentError);
}

TEST(Sha256IsaTest, RefusesWhatTheMachineLacks) {
#if defined(__x86_64__)
  EXPECT_THROW(sha256_code(Sha256Isa::kArmv8), ArgumentError);
#else
  EXPECT_THROW(sha256_code(Sha256Isa::kShaNi), ArgumentError);
#endif
}

}  // namespace
}  // namespace kvspan
