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

// What else is known of the way a call came.
enum CallFlags : std::uint8_t {
  kAsync = 1,
  kInBackward = 2,
  kByReducer = 4,  // from C++ in the midst of a backward pass: DDP's reducer
};

struct Origin {
  const Location* location = nullptr;
  std::uint8_t flags = 0;

  std::uint32_t id() const noexcept { return location != nullptr ? location->id : 0; }
  std::string text() const { return location != nullptr ? location->text : std::string(); }
};

}  // namespace phalanx
