// Tables of the fields of structs that others read by their bytes: one row per field, beside the struct. Python gets
// the tables, so that it mirrors no layout.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace phalanx {

// Bytes for later fields, always 0.
template <std::size_t kBytes>
struct Spare {
  std::uint8_t bytes[kBytes] = {};
};

struct Field {
  std::string_view name;
  std::size_t offset;
  std::size_t size;  // in bytes, of all elements
  std::size_t num;   // elements; more than one in an array
  char code;         // of an element, as Python's struct module spells it; x: spare, or described by another table

  // As Python's struct module spells it.
  std::string format() const { return (num == 1 && code != 's' ? "" : std::to_string(num)) + code; }
};

namespace detail {

template <class T>
struct PlainType {
  using type = T;
};
template <class T>
  requires std::is_enum_v<T>
struct PlainType<T> {
  using type = std::underlying_type_t<T>;
};
template <class T>
struct PlainType<std::atomic<T>> : PlainType<T> {
  static_assert(sizeof(std::atomic<T>) == sizeof(T));
};

template <class T>
constexpr char code_of() noexcept {
  using Plain = typename PlainType<T>::type;
  if constexpr (std::is_class_v<Plain>) return 'x';
  if constexpr (std::is_same_v<Plain, bool>) return '?';
  if constexpr (std::is_same_v<Plain, char>) return 's';
  if constexpr (std::is_same_v<Plain, double>) return 'd';
  if constexpr (std::is_integral_v<Plain>) {
    constexpr std::string_view codes = std::is_signed_v<Plain> ? "bh.i...q" : "BH.I...Q";
    return codes[sizeof(Plain) - 1];
  }
}

}  // namespace detail

template <class Member>
constexpr Field field(std::string_view name, std::size_t offset) noexcept {
  using Element = std::remove_all_extents_t<Member>;
  constexpr char code = detail::code_of<Element>();
  return {name, offset, sizeof(Member), code == 'x' ? sizeof(Member) : sizeof(Member) / sizeof(Element), code};
}

#define PHALANX_FIELD(Struct, member) \
  ::phalanx::field<decltype(std::declval<Struct&>().member)>(#member, offsetof(Struct, member))

// The fields of a struct that is a member of another one, at this offset.
template <std::size_t kNum>
constexpr std::array<Field, kNum> moved(std::array<Field, kNum> fields, std::size_t offset) noexcept {
  for (Field& each : fields) each.offset += offset;
  return fields;
}

template <std::size_t... kNums>
constexpr auto joined(const std::array<Field, kNums>&... parts) noexcept {
  std::array<Field, (kNums + ...)> all{};
  std::size_t at = 0;
  const auto add = [&](const auto& part) {
    for (const Field& each : part) all[at++] = each;
  };
  (add(parts), ...);
  return all;
}

// Whether the fields lie one after another and leave no byte of a struct of this size out.
template <std::size_t kNum>
constexpr bool covers(const std::array<Field, kNum>& fields, std::size_t size) noexcept {
  std::size_t end = 0;
  for (const Field& each : fields) {
    if (each.offset != end) return false;
    end += each.size;
  }
  return end == size;
}

}  // namespace phalanx
