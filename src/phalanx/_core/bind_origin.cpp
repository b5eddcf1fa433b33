#include "bind_origin.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "black_box.hpp"
#include "frames.hpp"
#include "shapes.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// What a frame's code belongs to.
enum class Owner : std::uint8_t { program, ours, autograd, others };

struct Site {
  PyCodeObject* code = nullptr;
  int instruction = 0;
  bool operator==(const Site&) const = default;
};

struct SiteHash {
  std::size_t operator()(const Site& site) const noexcept {
    return reinterpret_cast<std::size_t>(site.code) / 16 * 31 + static_cast<std::size_t>(site.instruction);
  }
};

// Programs that make code while they run would fill it.
constexpr std::size_t kMostKnown = 8192;
constexpr std::size_t kRecent = 256;

// All with the GIL held.
struct Known {
  // Folders, each with a slash at its end, or files. `autograd` is where backward passes are begun.
  std::string ours, autograd;
  std::vector<std::string> others;
  // Of code that is kept, so that no other gets its address.
  std::unordered_map<PyCodeObject*, Owner> owners;
  std::unordered_map<Site, const Location*, SiteHash> sites;
  // Some of both, found without a search.
  std::array<std::pair<PyCodeObject*, Owner>, kRecent> recent_owners{};
  std::array<std::pair<Site, const Location*>, kRecent> recent_sites{};
  std::map<std::string, Location*> locations;  // by their parts
};

Known& everything_known() {
  static auto* const made = new Known;
  return *made;
}

std::string utf8(PyObject* text) {
  Py_ssize_t size = 0;
  const char* data = text != nullptr && PyUnicode_Check(text) ? PyUnicode_AsUTF8AndSize(text, &size) : nullptr;
  if (data != nullptr) return {data, static_cast<std::size_t>(size)};
  PyErr_Clear();
  return "?";
}

// Packages may be installed inside of the folder of the standard library.
bool lies_in(std::string_view file, const std::string& folder) {
  return !folder.empty() && file.starts_with(folder) &&
         file.find("site-packages/", folder.size()) == std::string_view::npos;
}

Owner find_owner(PyCodeObject* code) {
  Known& known = everything_known();
  const auto found = known.owners.find(code);
  if (found != known.owners.end()) return found->second;
  if (known.owners.size() > kMostKnown) {
    known.sites.clear();
    known.recent_owners.fill({});
    known.recent_sites.fill({});
    // What goes may call back here.
    for (const auto& [kept, owner] : std::exchange(known.owners, {})) Py_DECREF(kept);
  }
  const std::string file = utf8(code->co_filename);
  const auto is_other = [&](const std::string& folder) { return lies_in(file, folder); };
  Owner owner = Owner::program;
  if (lies_in(file, known.ours)) {
    owner = Owner::ours;
  } else if (lies_in(file, known.autograd)) {
    owner = Owner::autograd;
  } else if (file.starts_with("<frozen ") || std::any_of(known.others.begin(), known.others.end(), is_other)) {
    owner = Owner::others;
  }
  Py_INCREF(code);
  known.owners.emplace(code, owner);
  return owner;
}

Owner owner_of(PyCodeObject* code) {
  auto& recent = everything_known().recent_owners[reinterpret_cast<std::size_t>(code) / 16 % kRecent];
  if (recent.first != code) recent = {code, find_owner(code)};
  return recent.second;
}

// As seen from the working folder, if it lies there; else its end, as people are short of room.
std::string short_path(const std::string& file) {
  std::string_view path = file;
  char here[PATH_MAX];
  if (::getcwd(here, sizeof(here)) != nullptr) {
    const std::string folder = std::string(here) + "/";
    if (path.starts_with(folder)) path.remove_prefix(folder.size());
  }
  constexpr std::size_t kLongest = 72;
  if (path.size() <= kLongest) return std::string(path);
  path.remove_prefix(path.size() - kLongest);
  while (!path.empty() && (static_cast<unsigned char>(path[0]) & 0xc0) == 0x80) path.remove_prefix(1);
  const std::size_t slash = path.find('/');
  return ".../" + std::string(slash == std::string_view::npos ? path : path.substr(slash + 1));
}

const Location* find_location(const Site& site) {
  Known& known = everything_known();
  PyCodeObject* code = site.code;
  const auto found = known.sites.find(site);
  if (found != known.sites.end()) return found->second;
  const std::string file = utf8(code->co_filename);
  const std::string function = utf8(code->co_name);
  const std::string line = std::to_string(PyCode_Addr2Line(code, site.instruction));
  const std::string parts = file + kDivider + line + kDivider + function;
  Location*& location = known.locations[parts];
  if (location == nullptr) {
    location = new Location{static_cast<std::uint32_t>(known.locations.size()),
                            short_path(file) + ":" + line + ", in " + function, parts};
  }
  known.sites.emplace(site, location);
  return location;
}

const Location* location_of(const Frame& frame) {
  const Site site{frame.code, frame.instruction};
  auto& recent = everything_known().recent_sites[SiteHash()(site) % kRecent];
  if (recent.first != site) recent = {site, find_location(site)};
  return recent.second;
}

}  // namespace

Origin origin_of_call() {
  struct Search {
    Origin origin;
    bool only_ours = true;
  } search;
  walk_frames(
      [](const Frame& frame, void* context) {
        auto& [origin, only_ours] = *static_cast<Search*>(context);
        const Owner owner = owner_of(frame.code);
        if (owner == Owner::program) origin.location = location_of(frame);
        if (owner == Owner::autograd) origin.flags |= kInBackward | (only_ours ? kByReducer : 0);
        only_ours = only_ours && owner == Owner::ours;
        return owner == Owner::program;
      },
      &search);
  return search.origin;
}

Shape shape_of(nb::handle sizes, std::int64_t count) {
  const bool is_tuple = PyTuple_Check(sizes.ptr());
  if (!is_tuple && !PyList_Check(sizes.ptr())) return {};
  std::vector<std::int64_t> numbers;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sizes.ptr()); ++i) {
    numbers.push_back(PyLong_AsLongLong(PySequence_Fast_ITEMS(sizes.ptr())[i]));
    if (numbers.back() < 0) PyErr_Clear();
  }
  return shape_of(numbers.data(), numbers.size(), !is_tuple, count);
}

void bind_origin(nb::module_& module) {
  module.def(
      "set_folders",
      [](const std::string& ours, const std::string& autograd, std::vector<std::string> others) {
        Known& known = everything_known();
        known.ours = ours;
        known.autograd = autograd;
        known.others = std::move(others);
      },
      "ours"_a, "autograd"_a, "others"_a);
  module.def(
      "origin",
      [] {
        const Origin origin = origin_of_call();
        return nb::make_tuple(text_of(origin.location), static_cast<int>(origin.flags));
      },
      nb::sig("def origin() -> tuple[str, int]"), "Where in the program this call is made, and how it came there.");
}

}  // namespace phalanx
