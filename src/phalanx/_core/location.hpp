// Where in the program a call was made.
#pragma once

#include <cstdint>
#include <string>

namespace phalanx {

// Never changes and never goes away once it was made.
struct Location {
  std::uint32_t id;   // from 1
  std::string text;   // for people: "train.py:12, in step"
  std::string parts;  // for the black box: file, line and function, as black_box.hpp has them
};

// Of a place that may not be known.
inline std::uint32_t id_of(const Location* location) noexcept { return location != nullptr ? location->id : 0; }
inline std::string text_of(const Location* location) { return location != nullptr ? location->text : std::string(); }

// How a call came.
struct Origin {
  const Location* location = nullptr;
  std::uint8_t flags = 0;  // CallFlags
};

}  // namespace phalanx
