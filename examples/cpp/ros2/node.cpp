// A node of ROS 2 that asks about the newest picture of a topic:
//
//   ros2 run vtx_ros node --ros-args -p bundle:=BUNDLE -p question:=TEXT -r image:=/camera/image_raw
//
// Pictures that come while it answers replace each other; answers go to the topic `answer`.
#include <map>
#include <memory>
#include <string>
#include <thread>

#include <rclcpp/rclcpp.hpp>
#include <sensor_msgs/msg/image.hpp>
#include <std_msgs/msg/string.hpp>

#include "../watch.hpp"

namespace {

using Picture = sensor_msgs::msg::Image;
using Text = std_msgs::msg::String;

vtx_pixel_format format_of(const std::string& encoding) {
  static const std::map<std::string, vtx_pixel_format> formats{
      {"rgb8", VTX_RGB8}, {"bgr8", VTX_BGR8}, {"bgra8", VTX_BGRA8}, {"mono8", VTX_GRAY8}, {"yuv422_yuy2", VTX_YUYV}};
  auto at = formats.find(encoding);
  if (at == formats.end()) throw std::runtime_error("the encoding " + encoding + " is not known; publish rgb8 or bgr8");
  return at->second;
}

Frame frame_of(const Picture& picture) {
  Frame frame;
  frame.name = picture.header.frame_id;
  frame.bytes = picture.data;
  frame.width = static_cast<int>(picture.width);
  frame.height = static_cast<int>(picture.height);
  frame.stride = picture.step;
  frame.format = format_of(picture.encoding);
  return frame;
}

}  // namespace

int main(int count, char** values) {
  rclcpp::init(count, values);
  auto node = std::make_shared<rclcpp::Node>("vtx");
  try {
    vtx::Model model(node->declare_parameter<std::string>("bundle", ""));
    WatchOptions options;
    options.questions = {{node->declare_parameter<std::string>("question", "What is there?")}};
    options.near = node->declare_parameter<double>("near", 0.0);
    Newest newest;
    auto publisher = node->create_publisher<Text>("answer", 10);
    auto subscription =
        node->create_subscription<Picture>("image", rclcpp::SensorDataQoS(), [&](Picture::ConstSharedPtr picture) {
          try {
            newest.put(frame_of(*picture));
          } catch (const std::exception& error) {
            RCLCPP_ERROR(node->get_logger(), "%s", error.what());
          }
        });
    std::thread answers([&] {
      auto publish = [&](const Frame&, const std::string&, const std::string& answer, bool) {
        Text text;
        text.data = answer;
        publisher->publish(text);
        return true;
      };
      auto report = [&](const std::string&, const std::string& problem) {
        RCLCPP_ERROR(node->get_logger(), "%s", problem.c_str());
      };
      try {
        watch(model, [&] { return newest.take(); }, options, publish, report);
      } catch (const std::exception& error) {
        RCLCPP_ERROR(node->get_logger(), "%s", error.what());
      }
    });
    rclcpp::spin(node);
    newest.end();
    answers.join();
  } catch (const std::exception& error) {
    RCLCPP_ERROR(node->get_logger(), "%s", error.what());
    return 1;
  }
  rclcpp::shutdown();
  return 0;
}
