/* A camera that is a file: preloaded, it answers V4L2's calls. The file holds two buffers of STANDIN_LENGTH bytes.
 *
 * Its one format is STANDIN_FOURCC, of STANDIN_SIDE pixels a side and STANDIN_STRIDE bytes a row. The first buffer comes
 * marked as damaged, the second one cut short, then the first one whole; then the camera is gone. Calls out of order end
 * the process.
 */
#include <errno.h>
#include <linux/videodev2.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static unsigned queued, dequeued, streaming;

static unsigned number(const char* name) { return (unsigned)atoi(getenv(name)); }

static int refuse(int problem) {
  errno = problem;
  return -1;
}

static int set_format(struct v4l2_pix_format* pixels) {
  const char* code = getenv("STANDIN_FOURCC");
  if (pixels->pixelformat != v4l2_fourcc(code[0], code[1], code[2], code[3])) return refuse(EINVAL);
  pixels->width = pixels->height = number("STANDIN_SIDE");
  pixels->bytesperline = number("STANDIN_STRIDE");
  return 0;
}

static int dequeue(struct v4l2_buffer* buffer) {
  if (!streaming || queued <= dequeued) abort();
  if (dequeued == 3) return refuse(ENODEV);
  buffer->index = dequeued % 2;
  buffer->flags = dequeued == 0 ? V4L2_BUF_FLAG_ERROR : 0;
  buffer->bytesused = dequeued == 1 ? 0 : number("STANDIN_USED");
  ++dequeued;
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
    case VIDIOC_S_FMT: return set_format(&((struct v4l2_format*)argument)->fmt.pix);
    case VIDIOC_REQBUFS: ((struct v4l2_requestbuffers*)argument)->count = 2; return 0;
    case VIDIOC_QUERYBUF:
      buffer->length = number("STANDIN_LENGTH");
      buffer->m.offset = buffer->index * buffer->length;
      return 0;
    case VIDIOC_QBUF: ++queued; return 0;
    case VIDIOC_STREAMON: streaming = queued == 2; return 0;
    case VIDIOC_DQBUF: return dequeue(buffer);
    default: return (int)syscall(SYS_ioctl, file, request, argument);
  }
}
