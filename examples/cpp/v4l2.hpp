// A camera of Video4Linux. The driver fills a few buffers in turn, which are mapped into this process (V4L2_MEMORY_MMAP).
#pragma once

#include <fcntl.h>
#include <linux/videodev2.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "frame.hpp"

// The driver changed size or format of the pixels while the camera streams, as one behind a plug does; open it again.
struct FormatChanged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class V4l2Camera {
 public:
  // Opens a device such as /dev/video0 and starts it, near `width` x `height`. Throws std::runtime_error.
  V4l2Camera(const std::string& device, int width, int height) : device_(device) {
    file_ = ::open(device.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (file_ < 0) fail("cannot be opened (" + reason() + "); ls /dev/video* shows the cameras");
    try {
      check_camera();
      choose_format(width, height);
      map_buffers();
      v4l2_buf_type type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
      if (!call(VIDIOC_STREAMON, &type)) fail("does not start (" + reason() + "); end what else uses it");
    } catch (...) {
      close();
      throw;
    }
  }
  ~V4l2Camera() { close(); }
  V4l2Camera(const V4l2Camera&) = delete;
  V4l2Camera& operator=(const V4l2Camera&) = delete;

  // The next frame that came whole. Throws FormatChanged, and std::runtime_error where none comes for two seconds.
  Frame next() {
    while (true) {
      pollfd waiting{file_, POLLIN, 0};
      int ready = ::poll(&waiting, 1, 2000);
      if (ready == 0) fail("gave no frame for two seconds; is it in use, or asleep?");
      v4l2_buffer filled = buffer(0);
      if (!call(VIDIOC_DQBUF, &filled)) {
        if (errno == EAGAIN) continue;
        fail("gives no frames (" + reason() + "); was it pulled out?");
      }
      check_format();
      std::optional<Frame> frame = copy(filled);
      if (!call(VIDIOC_QBUF, &filled)) fail("takes no buffer back (" + reason() + ")");
      if (frame) return *std::move(frame);
    }
  }

 private:
  struct Mapped {
    void* data;
    size_t size;
  };

  [[noreturn]] void fail(const std::string& problem) const { throw std::runtime_error(device_ + " " + problem); }
  static std::string reason() { return std::strerror(errno); }

  bool call(unsigned long request, void* argument) const {
    int status;
    do status = ::ioctl(file_, request, argument);
    while (status < 0 && errno == EINTR);
    return status == 0;
  }

  static v4l2_buffer buffer(unsigned index) {
    v4l2_buffer out{};
    out.type = V4L2_BUF_TYPE_VIDEO_CAPTURE, out.memory = V4L2_MEMORY_MMAP, out.index = index;
    return out;
  }

  void check_camera() const {
    v4l2_capability can{};
    if (!call(VIDIOC_QUERYCAP, &can)) fail("is not a camera (" + reason() + "); ls /dev/video* shows the cameras");
    unsigned wanted = V4L2_CAP_VIDEO_CAPTURE | V4L2_CAP_STREAMING;
    unsigned has = can.capabilities & V4L2_CAP_DEVICE_CAPS ? can.device_caps : can.capabilities;
    if ((has & wanted) != wanted) fail("gives no frames of video; a camera often has several devices, try the next one");
  }

  // The first format that camera and libvtx share; the driver may choose another size than the one asked for.
  void choose_format(int width, int height) {
    constexpr struct {
      unsigned theirs;
      vtx_pixel_format ours;
    } kFormats[] = {{V4L2_PIX_FMT_YUYV, VTX_YUYV}, {V4L2_PIX_FMT_NV12, VTX_NV12}, {V4L2_PIX_FMT_MJPEG, VTX_FILE}};
    for (auto format : kFormats) {
      v4l2_format asked{};
      asked.type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
      v4l2_pix_format& pixels = asked.fmt.pix;
      pixels.width = static_cast<unsigned>(width), pixels.height = static_cast<unsigned>(height);
      pixels.pixelformat = format.theirs, pixels.field = V4L2_FIELD_NONE;
      if (!call(VIDIOC_S_FMT, &asked) || pixels.pixelformat != format.theirs) continue;
      format_ = format.ours, theirs_ = format.theirs;
      width_ = static_cast<int>(pixels.width), height_ = static_cast<int>(pixels.height);
      stride_ = pixels.bytesperline;
      return;
    }
    fail("gives frames neither in YUYV nor in NV12 nor in MJPEG; v4l2-ctl --list-formats shows what it has");
  }

  // Throws FormatChanged if the driver's format is no longer the one that frames are read by.
  void check_format() const {
    v4l2_format now{};
    now.type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
    if (!call(VIDIOC_G_FMT, &now)) return;
    const v4l2_pix_format& pixels = now.fmt.pix;
    int width = static_cast<int>(pixels.width), height = static_cast<int>(pixels.height);
    if (width == width_ && height == height_ && pixels.bytesperline == stride_ && pixels.pixelformat == theirs_) return;
    auto text = [](int w, int h, size_t row, unsigned code) {
      std::string name(reinterpret_cast<const char*>(&code), 4);
      return std::to_string(w) + "x" + std::to_string(h) + " " + name + " of " + std::to_string(row) + " bytes a row";
    };
    throw FormatChanged(device_ + " changed its format from " + text(width_, height_, stride_, theirs_) + " to " +
                        text(width, height, pixels.bytesperline, pixels.pixelformat));
  }

  void map_buffers() {
    v4l2_requestbuffers wanted{};
    wanted.count = 4, wanted.type = V4L2_BUF_TYPE_VIDEO_CAPTURE, wanted.memory = V4L2_MEMORY_MMAP;
    if (!call(VIDIOC_REQBUFS, &wanted) || wanted.count == 0) fail("has no buffers to map (" + reason() + ")");
    for (unsigned i = 0; i < wanted.count; ++i) {
      v4l2_buffer one = buffer(i);
      if (!call(VIDIOC_QUERYBUF, &one)) fail("does not describe its buffers (" + reason() + ")");
      void* data = ::mmap(nullptr, one.length, PROT_READ | PROT_WRITE, MAP_SHARED, file_, one.m.offset);
      if (data == MAP_FAILED) fail("cannot be mapped (" + reason() + ")");
      mapped_.push_back({data, one.length});
      if (!call(VIDIOC_QBUF, &one)) fail("takes no buffer (" + reason() + ")");
    }
  }

  // What a filled buffer holds; none where the driver says that it is damaged, or where it is cut short.
  std::optional<Frame> copy(const v4l2_buffer& filled) const {
    if (filled.index >= mapped_.size() || filled.flags & V4L2_BUF_FLAG_ERROR) return std::nullopt;
    const Mapped& memory = mapped_[filled.index];
    size_t size = filled.bytesused, rows = static_cast<size_t>(height_);
    size_t needed = format_ == VTX_FILE ? 1 : stride_ * (format_ == VTX_NV12 ? rows + (rows + 1) / 2 : rows);
    if (size < needed || size > memory.size) return std::nullopt;
    Frame frame{device_, {}, width_, height_, stride_, format_};
    auto data = static_cast<const uint8_t*>(memory.data);
    frame.bytes.assign(data, data + size);
    return frame;
  }

  void close() {
    for (const Mapped& one : mapped_) ::munmap(one.data, one.size);
    mapped_.clear();
    ::close(file_);  // which stops the camera
  }

  std::string device_;
  int file_ = -1, width_ = 0, height_ = 0;
  size_t stride_ = 0;
  vtx_pixel_format format_ = VTX_FILE;
  unsigned theirs_ = 0;
  std::vector<Mapped> mapped_;
};
