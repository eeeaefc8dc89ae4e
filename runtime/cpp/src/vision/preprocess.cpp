// From RGB bytes to the vision graph's pixel_values, with the numbers of Hugging Face's PIL processors.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "vision/picture.hpp"

namespace vtxcore {
namespace {

Picture squared(const Picture& picture, const std::array<int, 3>& background) {
  int side = std::max(picture.width, picture.height);
  if (int64_t{side} * side > names::kMaxPixels)
    fail(Kind::image, "the image is ", picture.width, "x", picture.height, " pixels, padded to a square it would be ", side,
         "x", side, "; the limit is ", grouped(names::kMaxPixels), " in total; shrink its longer side to ",
         static_cast<int>(std::sqrt(names::kMaxPixels)));
  Picture out(side, side);
  for (size_t i = 0; i < out.data.size(); ++i) out.data[i] = static_cast<uint8_t>(background[i % 3]);
  int left = (side - picture.width) / 2, top = (side - picture.height) / 2;
  for (int y = 0; y < picture.height; ++y)
    std::memcpy(out.pixel(left, top + y), picture.pixel(0, y), 3 * static_cast<size_t>(picture.width));
  return out;
}

// width, height
std::pair<int64_t, int64_t> resized_size(const Picture& picture, const ImageSettings& settings) {
  if (settings.resize) return {settings.resize->second, settings.resize->first};
  if (settings.shortest == 0) return {picture.width, picture.height};
  int64_t edge = settings.shortest;
  double longest = std::max(picture.width, picture.height), shortest = std::min(picture.width, picture.height);
  auto longer = static_cast<int64_t>(static_cast<double>(edge) * longest / shortest);
  return picture.width <= picture.height ? std::pair(edge, longer) : std::pair(longer, edge);
}

void check_resized(const Picture& picture, int64_t width, int64_t height) {
  if (std::max(width, height) <= names::kMaxResizedSide && width * height <= names::kMaxResizedPixels) return;
  int64_t shorter = std::min(width, height);
  int64_t ratio = std::min(names::kMaxResizedSide, names::kMaxResizedPixels / shorter) / shorter;
  fail(Kind::image, "the image is ", picture.width, "x", picture.height, " pixels; its sides may differ at most ", ratio,
       "-fold, as it is resized to ", width, "x", height, " before the crop; cut off some of its longer side");
}

// A normalised picture of another size, resized in its numbers as PyTorch's bilinear `interpolate` does.
Floats interpolated(const Picture& picture, int width, int height, const ImageSettings& settings) {
  Pixels whole = normalised(picture, settings);
  size_t area = static_cast<size_t>(picture.width) * static_cast<size_t>(picture.height);
  Rows grid(area, 3);
  for (size_t c = 0; c < 3; ++c)
    for (size_t i = 0; i < area; ++i) grid.row(i)[c] = whole.values[c * area + i];
  Rows shrunk = shrunk_grid(grid, picture.height, picture.width, height, width);
  Floats out(3 * shrunk.count());
  for (size_t c = 0; c < 3; ++c)
    for (size_t i = 0; i < shrunk.count(); ++i) out[c * shrunk.count() + i] = shrunk.row(i)[c];
  return out;
}

// The picture in its own shape at the top left of the graph's input, which is 0 elsewhere, or in the middle or at the bottom
// right of black.
Pixels preprocess_within(const Picture& picture, const ImageSettings& settings) {
  auto [height, width] = settings.output();
  double scale = std::min(static_cast<double>(height) / picture.height, static_cast<double>(width) / picture.width);
  double ratio = std::max(static_cast<double>(picture.width) / width, static_cast<double>(picture.height) / height);
  bool black = settings.centred || settings.ended;
  auto side = [&](int own) {  // in black with openpi's rounding
    return std::max(1, static_cast<int>(black ? own / ratio : own * scale));
  };
  int wide = side(picture.width), high = side(picture.height);
  bool same = wide == picture.width && high == picture.height;
  Floats shown = settings.interpolated && !same
                     ? interpolated(picture, wide, high, settings)
                     : normalised(resized(picture, wide, high, settings.resample), settings).values;
  auto rows = static_cast<size_t>(height), columns = static_cast<size_t>(width), own = static_cast<size_t>(wide);
  Pixels out{height, width, Floats(3 * rows * columns)};
  size_t left = 0, top = 0;
  if (black) {
    out = normalised(Picture(width, height), settings);
    left = columns - own, top = rows - static_cast<size_t>(high);
    if (settings.centred) left /= 2, top /= 2;
  }
  for (size_t c = 0; c < 3; ++c)
    for (size_t y = 0; y < static_cast<size_t>(high); ++y)
      std::copy_n(&shown[(c * static_cast<size_t>(high) + y) * own], own,
                  &out.values[(c * rows + top + y) * columns + left]);
  return out;
}

// The middle of the picture; where that is larger than it, black stands around it.
Picture cropped(const Picture& picture, int width, int height) {
  Picture out(width, height);
  // Python's // rounds down, also below zero.
  auto half = [](int difference) { return difference >= 0 ? difference / 2 : -((1 - difference) / 2); };
  int left = half(picture.width - width), top = half(picture.height - height);
  int first = std::max(0, -left), last = std::min(width, picture.width - left);
  for (int y = std::max(0, -top); y < std::min(height, picture.height - top); ++y)
    if (last > first)
      std::memcpy(out.pixel(first, y), picture.pixel(left + first, top + y), 3 * static_cast<size_t>(last - first));
  return out;
}

}  // namespace

Pixels normalised(const Picture& picture, const ImageSettings& settings) {
  size_t area = picture.data.size() / 3;
  Pixels out{picture.height, picture.width, Floats(picture.data.size())};
  for (size_t c = 0; c < 3; ++c) {
    float table[256];  // what each value of a byte becomes, rounded to float32 after each step, as HF does
    for (int value = 0; value < 256; ++value) {
      auto rescaled = static_cast<float>(value * settings.rescale);
      table[value] = (rescaled - static_cast<float>(settings.mean[c])) / static_cast<float>(settings.std[c]);
    }
    for (size_t i = 0; i < area; ++i) out.values[c * area + i] = table[picture.data[3 * i + c]];
  }
  return out;
}

void check_size(const std::string& name, int64_t width, int64_t height) {
  if (std::min(width, height) < 1)
    fail(Kind::image, name, " is ", width, "x", height, " pixels: there is nothing to see; give an image with pixels");
  if (std::max(width, height) > names::kMaxSide || width * height > names::kMaxPixels)
    fail(Kind::image, name, " is ", width, "x", height, " pixels; the limit is ", grouped(names::kMaxSide), " a side and ",
         grouped(names::kMaxPixels), " in total; shrink it first");
}

Picture cut(const Picture& picture, int x, int y, int width, int height) {
  Picture out(width, height);
  for (int row = 0; row < height; ++row)
    std::memcpy(out.pixel(0, row), picture.pixel(x, y + row), 3 * static_cast<size_t>(width));
  return out;
}

ImageSettings fitted(const ImageSettings& settings, const std::string& fit) {
  if (fit.empty()) return settings;
  if (fit != "crop" && fit != "pad" && fit != "squash")
    fail(Kind::request, "fit is '", fit.substr(0, 20), "'; it must be one of crop, pad, squash, or left out");
  if (settings.within) fail(Kind::request, "fit '", fit, "' has no effect here: pictures keep their shape; leave it out");
  std::string trained = settings.pad ? "pad" : settings.resize ? "squash" : "crop";
  if (fit == trained) return settings;
  ImageSettings out = settings;
  auto [height, width] = settings.output();
  out.pad.reset();
  out.resize.reset();
  out.shortest = 0;
  out.crop.reset();
  if (fit == "squash") {
    out.resize = {height, width};
  } else if (fit == "crop") {
    out.shortest = std::max(height, width);
    out.crop = {height, width};
  } else {
    if (height != width)
      fail(Kind::request, "fit 'pad' makes squares, this model takes ", width, "x", height, "; use crop or squash");
    out.pad = {127, 127, 127};
    bool normalised = std::any_of(settings.mean.begin(), settings.mean.end(), [](double mean) { return mean != 0; });
    for (size_t c = 0; normalised && c < 3; ++c)
      (*out.pad)[c] = static_cast<int>(std::clamp(settings.mean[c] / (255 * settings.rescale), 0.0, 1.0) * 255);
    out.resize = {height, width};
  }
  return out;
}

ImageSettings among_several(const ImageSettings& settings) {
  ImageSettings out = fitted(settings, "pad");
  bool normalised = false, colour = true;
  out.pad = {0, 0, 0};
  for (size_t c = 0; c < 3; ++c) {
    double bar = std::trunc(255 * settings.mean[c]);
    normalised |= settings.mean[c] != 0 || settings.std[c] != 1;
    colour &= bar >= 0 && bar <= 255;
    if (colour) (*out.pad)[c] = static_cast<int>(bar);
  }
  if (!normalised || !colour)
    fail(Kind::request, "several images get bars of the image processor's mean colour, and its mean of [",
         python_repr(settings.mean[0]), ", ", python_repr(settings.mean[1]), ", ", python_repr(settings.mean[2]),
         "] is not one; ask about one image at a time, or about square ones");
  return out;
}

Region shown_region(const Picture& picture, const ImageSettings& settings) {
  Picture source;  // its size, after bars
  source.width = picture.width, source.height = picture.height;
  if (settings.pad) source.width = source.height = std::max(picture.width, picture.height);
  auto [columns, rows] = resized_size(source, settings);
  auto [shown_height, shown_width] = settings.output();
  auto first = [](int64_t bars, int64_t resized, int shown, double scale) {
    return static_cast<double>(-(bars / 2)) + std::floor(static_cast<double>(resized - shown) / 2) * scale;
  };
  const double across = static_cast<double>(source.width) / static_cast<double>(columns);
  const double down = static_cast<double>(source.height) / static_cast<double>(rows);
  const double left = first(source.width - picture.width, columns, shown_width, across);
  const double top = first(source.height - picture.height, rows, shown_height, down);
  return {left, top, left + shown_width * across, top + shown_height * down};
}

Pixels preprocess(const Picture& picture, const ImageSettings& settings) {
  if (settings.within) return preprocess_within(picture, settings);
  Picture square;
  const Picture* source = &picture;
  if (settings.pad) {
    square = squared(picture, *settings.pad);
    source = &square;
  }
  auto [width, height] = resized_size(*source, settings);
  Picture scaled;
  if (settings.resize || settings.shortest > 0) {
    check_resized(*source, width, height);
    scaled = resized(*source, static_cast<int>(width), static_cast<int>(height), settings.resample);
    source = &scaled;
  }
  auto [out_height, out_width] = settings.output();
  return normalised(cropped(*source, out_width, out_height), settings);
}

}  // namespace vtxcore
