// What the example node uses of rclcpp: parameters come from the environment, `spin` gives a picture of each of the files in
// ROS_PICTURES ("ENCODING WIDTH HEIGHT FILE ...") and waits for the answer to it.
#pragma once
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>

#include <sensor_msgs/msg/image.hpp>
#include <std_msgs/msg/string.hpp>

#define RCLCPP_ERROR(logger, ...) (static_cast<void>(logger), std::fprintf(stderr, __VA_ARGS__), std::fputs("\n", stderr))

namespace rclcpp {

struct SensorDataQoS {};
struct Subscription {};
inline std::mutex mutex;
inline std::condition_variable published;
inline int answers = 0;
inline std::function<void(sensor_msgs::msg::Image::ConstSharedPtr)> subscriber;

template <typename Message>
struct Publisher {
  void publish(const Message& message) {
    std::lock_guard<std::mutex> lock(mutex);
    std::printf("%s\n", message.data.c_str());
    ++answers;
    published.notify_all();
  }
};

class Node {
 public:
  explicit Node(const std::string&) {}
  template <typename Value>
  Value declare_parameter(const std::string& name, Value otherwise) {
    const char* text = std::getenv(("ROS_" + name).c_str());
    if constexpr (std::is_same_v<Value, std::string>)
      return text ? text : otherwise;
    else
      return text ? std::stod(text) : otherwise;
  }
  template <typename Message>
  std::shared_ptr<Publisher<Message>> create_publisher(const std::string&, int) {
    return std::make_shared<Publisher<Message>>();
  }
  template <typename Message, typename Callback>
  std::shared_ptr<Subscription> create_subscription(const std::string&, SensorDataQoS, Callback callback) {
    subscriber = callback;
    return std::make_shared<Subscription>();
  }
  int get_logger() const { return 0; }
};

inline void init(int, char**) {}
inline void shutdown() {}
inline void spin(const std::shared_ptr<Node>&) {
  std::istringstream pictures(std::getenv("ROS_PICTURES"));
  auto picture = std::make_shared<sensor_msgs::msg::Image>();
  std::string file;
  int before = 0;
  while (pictures >> picture->encoding >> picture->width >> picture->height >> file) {
    std::ifstream content(file, std::ios::binary);
    picture->data.assign(std::istreambuf_iterator<char>(content), {});
    picture->step = static_cast<uint32_t>(picture->data.size()) / picture->height;
    subscriber(picture);
    if (picture->encoding == "unknown") continue;
    std::unique_lock<std::mutex> lock(mutex);
    published.wait(lock, [&] { return answers > before; });
    before = answers;
  }
}

}  // namespace rclcpp
