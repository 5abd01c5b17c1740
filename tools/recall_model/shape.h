// The widths of the recall model and what lives where in its vectors. README.md tells the whole construction.
//
// A *code* is the eight bits of a byte as eight numbers, −1 or +1, lowest bit first. Constants only.
#pragma once

#include <cstdint>

namespace weft::recall {

inline constexpr int64_t kCode = 8;       // dimensions of a code
inline constexpr int64_t kLookBack = 16;  // J: bytes that must match

// The residual stream.
inline constexpr int64_t kHidden = 192;
constexpr int64_t place(int64_t back) { return back * kCode; }  // code of the byte `back` positions ago, 0…J
inline constexpr int64_t kRecalled = place(kLookBack + 1);      // code that attention fetched
inline constexpr int64_t kAnswer = kRecalled + kCode;           // code that the experts completed
inline constexpr int64_t kConstant = kAnswer + kCode;           // always kConstantValue
inline constexpr double kConstantValue = 2;
static_assert(kConstant < kHidden);

// Attention.
inline constexpr int64_t kHeads = kLookBack;
inline constexpr int64_t kNope = kLookBack * kCode;  // a head's content part: J codes
inline constexpr int64_t kRope = 16;                 // 8 rotary pairs
inline constexpr int64_t kValue = kCode;
inline constexpr int64_t kQueryLatent = kNope + 16;  // J codes and 16 constants
inline constexpr int64_t kLatent = kNope + 16;       // J codes, one more, 8 constants
inline constexpr double kRopeTheta = 1e6;
static_assert(kNope + kRope == 144);  // the softmax scale is 1/12

// Indexer: the rotary half finds the last J positions (layer 0), the other half similar passages (layer 1).
inline constexpr int64_t kIndexHeads = 2;
inline constexpr int64_t kIndexWidth = 32;
inline constexpr int64_t kIndexContent = kIndexWidth - kRope;
inline constexpr int64_t kIndexTopK = 256;

// Feed-forward.
inline constexpr int64_t kDenseWidth = kLookBack * kCode * 4;  // 512: four units for each bit
inline constexpr int64_t kExperts = 32;                        // 16 for high nibbles, then 16 for low ones
inline constexpr int64_t kExpertWidth = 64;
inline constexpr int64_t kExpertsPerToken = 2;
inline constexpr int64_t kExpertGroups = 4;
inline constexpr int64_t kTopExpertGroups = 2;
inline constexpr double kExpertScale = 2;  // undoes the normalisation of two equal weights
inline constexpr double kNormEps = 1e-5;

// Vocabulary: a byte's token is the byte; then the specials; the rest is padding.
inline constexpr int64_t kVocabulary = 272;
inline constexpr int64_t kBeginToken = 256, kEndToken = 257, kPadToken = 258;
// Specials look like control bytes to the model. End of text is the one it can also answer.
inline constexpr int64_t kBeginByte = 0x02, kEndByte = 0x03, kPadByte = 0x00;

inline constexpr int64_t kLayers = 2;
inline constexpr int64_t kContextMax = 1 << 20;  // the rotary part is checked up to here

}  // namespace weft::recall
