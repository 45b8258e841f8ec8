#include "store/manifest.h"

#include <errno.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "store/block_file.h"
#include "store/directory_scan.h"

namespace kvtransfer {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;

// What the file says may be anything: only printable characters of it are shown.
[[noreturn]] void refuse(std::string why) {
  for (char& c : why) {
    if (c < ' ' || c > '~') c = '?';
  }
  throw Error(ErrorCode::kMismatch, "store manifest: " + why);
}

uint32_t number(const std::string& word, uint32_t most) {
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size() || value == 0 || value > most) {
    refuse("'" + word + "' is no number in 1.." + std::to_string(most));
  }
  return value;
}

std::string first_line() {
  return "kvtransfer block store, format " + std::to_string(kBlockFormatVersion);
}

// "layers 30 x 192 192"
void parse_layers(std::istringstream& words, std::vector<std::vector<uint32_t>>& layers) {
  std::string count, by, word;
  words >> count >> by;
  if (by != "x") refuse("a line of layers reads 'layers <count> x <bytes> ...'");
  const uint32_t num_layers = number(count, BlockLayout::kMaxLayers);
  std::vector<uint32_t> planes;
  while (words >> word && planes.size() <= BlockLayout::kMaxPlanes) {
    planes.push_back(number(word, BlockLayout::kMaxPlaneBytes));
  }
  if (layers.size() + num_layers > BlockLayout::kMaxLayers) refuse("too many layers");
  layers.insert(layers.end(), num_layers, planes);
}

// "encoding fp8_of_bfloat16 64"
BlockEncoding parse_encoding(std::istringstream& words) {
  std::string kind, group;
  words >> kind >> group;
  const std::string named = kind.substr(0, 80) += " " + group;
  for (const auto known :
       {BlockEncoding::Kind::kFp8OfBfloat16, BlockEncoding::Kind::kFp8OfFloat16}) {
    const BlockEncoding encoding{known, number(group, BlockEncoding::kMaxGroup)};
    if (encoding.to_string() == named) return encoding;
  }
  refuse("unknown encoding '" + named + "'");
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  const BlockLayout& layout = manifest.layout;
  std::string text = first_line() + "\nnamespace " + to_hex(manifest.name_space) +
                     "\nblock_tokens " + std::to_string(layout.block_tokens()) + "\n";
  const auto planes_of = [&](uint32_t layer) {
    std::string planes;
    for (uint32_t plane = 0; plane < layout.num_planes(layer); ++plane) {
      planes += " " + std::to_string(layout.plane_bytes(layer, plane));
    }
    return planes;
  };
  for (uint32_t layer = 0; layer < layout.num_layers();) {
    const std::string planes = planes_of(layer);
    const uint32_t first = layer;
    while (layer < layout.num_layers() && planes_of(layer) == planes) ++layer;
    text += "layers " + std::to_string(layer - first) + " x" + planes + "\n";
  }
  if (!manifest.encoding.raw()) text += "encoding " + manifest.encoding.to_string() + "\n";
  return text;
}

Manifest parse_manifest(const std::string& text) {
  std::istringstream lines(text);
  std::string line, name_space;
  uint32_t block_tokens = 0;
  std::vector<std::vector<uint32_t>> layers;
  BlockEncoding encoding;
  if (!std::getline(lines, line) || line != first_line()) {
    refuse("it begins with '" + line.substr(0, 80) + "', this build reads '" + first_line() + "'");
  }
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string what, word;
    words >> what;
    if (what == "namespace") {
      words >> name_space;
    } else if (what == "block_tokens") {
      words >> word;
      block_tokens = number(word, BlockLayout::kMaxBlockTokens);
    } else if (what == "layers") {
      parse_layers(words, layers);
    } else if (what == "encoding") {
      encoding = parse_encoding(words);
    } else {
      refuse("unknown line '" + line.substr(0, 80) + "'");
    }
  }
  const auto key = key_from_hex(name_space);
  if (!key) refuse("no namespace of 64 hex digits");
  if (block_tokens == 0 || layers.empty()) refuse("no block_tokens or no layers");
  try {
    Manifest manifest{*key, BlockLayout(block_tokens, std::move(layers)), encoding};
    encoding.check(manifest.layout);
    if (manifest_text(manifest) == text) return manifest;
  } catch (const Error& error) {
    refuse(error.what());
  }
  refuse("not as this program writes it");
}

std::string read_manifest(const std::string& root) {
  std::ifstream file(root + "/" + kManifestName, std::ios::binary);
  if (!file) {
    throw Error(ErrorCode::kIo, root + " is no block store: it has no file " + kManifestName,
                errno);
  }
  std::string text(kMaxBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

Outcome open_store_directory(const std::string& root, const std::string& text) {
  std::error_code code;
  fs::create_directories(root, code);
  if (code || !fs::is_directory(root, code)) {
    return {ErrorCode::kIo, code ? code.value() : ENOTDIR,
            "store directory " + root + " can't be used"};
  }
  const std::string path = root + "/" + kManifestName;
  if (!fs::exists(path, code)) {
    // Written under another name and linked, so that two processes starting at once agree.
    const std::string temporary =
        root + "/" + kTemporaryPrefix + "manifest-" + std::to_string(std::random_device()());
    std::ofstream(temporary, std::ios::binary) << text;
    if (link(temporary.c_str(), path.c_str()) != 0 && errno != EEXIST) {
      fs::rename(temporary, path, code);  // a file system without hard links
    }
    unlink(temporary.c_str());
  }
  try {
    const std::string found = read_manifest(root);
    if (found == text) return {};
    parse_manifest(found);  // says what is wrong with it, if it is none
    return {ErrorCode::kMismatch, 0,
            "store " + root +
                " was made for another format, namespace, layout or encoding; found [" + found +
                "], this run needs [" + text + "]: use another store directory"};
  } catch (const Error& error) {
    return {error.code(), error.sys_errno(), error.what()};
  }
}

}  // namespace kvtransfer
