/* A camera that is a file: preloaded, it answers V4L2's calls. The file holds two buffers of STANDIN_LENGTH bytes.
 *
 * Its one format is STANDIN_FOURCC, of STANDIN_SIDE pixels a side and STANDIN_STRIDE bytes a row. The first buffer comes
 * marked as damaged, the second one cut short, then whole ones, STANDIN_FRAMES in all. Then the camera is gone, or with
 * STANDIN_LATER_SIDE it has that side in two further frames, whatever the one who reads them knows of it, and then is gone.
 * Calls out of order end the process.
 */
#include <errno.h>
#include <linux/videodev2.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static unsigned queued, dequeued, streaming, frames; /* of this time that it streams, but for the frames so far */

static unsigned number(const char* name) { return (unsigned)atoi(getenv(name)); }

static int refuse(int problem) {
  errno = problem;
  return -1;
}

static int get_format(struct v4l2_pix_format* pixels) {
  const char* code = getenv("STANDIN_FOURCC");
  unsigned first = number("STANDIN_SIDE"), later = getenv("STANDIN_LATER_SIDE") && frames > number("STANDIN_FRAMES");
  unsigned side = later ? number("STANDIN_LATER_SIDE") : first;
  pixels->pixelformat = v4l2_fourcc(code[0], code[1], code[2], code[3]);
  pixels->width = pixels->height = side;
  pixels->bytesperline = number("STANDIN_STRIDE") * side / first;
  pixels->sizeimage = number("STANDIN_USED") * side / first * side / first;
  return 0;
}

static int set_format(struct v4l2_pix_format* pixels) {
  struct v4l2_pix_format known = *pixels;
  get_format(&known);
  if (pixels->pixelformat != known.pixelformat) return refuse(EINVAL);
  *pixels = known;
  return 0;
}

static int dequeue(struct v4l2_buffer* buffer) {
  if (!streaming || queued <= dequeued) abort();
  if (frames == number("STANDIN_FRAMES") + (getenv("STANDIN_LATER_SIDE") ? 2 : 0)) return refuse(ENODEV);
  buffer->index = dequeued % 2;
  buffer->flags = frames == 0 ? V4L2_BUF_FLAG_ERROR : 0;
  ++dequeued, ++frames;
  struct v4l2_pix_format format;
  get_format(&format);
  buffer->bytesused = frames == 2 ? 0 : format.sizeimage;
  return 0;
}

int ioctl(int file, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  struct v4l2_buffer* buffer = argument;
  switch (request) {
    case VIDIOC_QUERYCAP:
      ((struct v4l2_capability*)argument)->capabilities = V4L2_CAP_VIDEO_CAPTURE | V4L2_CAP_STREAMING;
      return 0;
    case VIDIOC_G_FMT: return get_format(&((struct v4l2_format*)argument)->fmt.pix);
    case VIDIOC_S_FMT: return set_format(&((struct v4l2_format*)argument)->fmt.pix);
    case VIDIOC_REQBUFS:
      queued = dequeued = streaming = 0;
      ((struct v4l2_requestbuffers*)argument)->count = 2;
      return 0;
    case VIDIOC_QUERYBUF:
      buffer->length = number("STANDIN_LENGTH");
      buffer->m.offset = buffer->index * buffer->length;
      return 0;
    case VIDIOC_G_PARM:
      ((struct v4l2_streamparm*)argument)->parm.capture.timeperframe = (struct v4l2_fract){1, 30};
      return 0;
    case VIDIOC_QBUF: ++queued; return 0;
    case VIDIOC_STREAMON: streaming = queued == 2; return 0;
    case VIDIOC_G_INPUT:
    case VIDIOC_ENUMINPUT:
    case VIDIOC_STREAMOFF: return 0;
    case VIDIOC_DQBUF: return dequeue(buffer);
    default: return (int)syscall(SYS_ioctl, file, request, argument);
  }
}
