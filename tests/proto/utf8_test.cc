// UTF-8: what counts as text, and how any bytes become text.
#include "proto/utf8.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(Utf8, KnowsGoodFromBad) {
  for (const char* good : {"", "a", "\u00e9", "\u20ac", "\U0001F600", "\u07ff\u0800\ud7ff\ue000\U0010FFFF"}) {
    EXPECT_TRUE(is_utf8(good)) << good;
  }
  for (const char* bad : {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xe2\x82", "a\xe2\x82z"}) {
    EXPECT_FALSE(is_utf8(bad)) << bad;
  }
}

TEST(Utf8, AnyBytesBecomeAText) {
  EXPECT_EQ(as_utf8("a\xC3\xA9"
                    "b",
                    100),
            "a\xC3\xA9"
            "b");
  EXPECT_EQ(as_utf8("\xFF"
                    "a\xE2\x82"
                    "b\xC3",
                    100),
            "?a??b?");
  EXPECT_EQ(as_utf8("aaaa", 3), "aaa");
  EXPECT_EQ(as_utf8("aa\xC3\xA9", 3), "aa");
  EXPECT_EQ(as_utf8("\xFF\xFF\xFF", 2), "??");
}

TEST(Utf8, BoundariesCutNoCharacter) {
  const std::string text = "a\u00e9\u20ac\U0001F600z";  // starts at 0 1 3 6 10, ends at 11
  const size_t expected[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11, 11};
  for (size_t limit = 0; limit < std::size(expected); ++limit) {
    EXPECT_EQ(character_boundary(text, limit), expected[limit]) << limit;
  }
}

}  // namespace
}  // namespace weft
