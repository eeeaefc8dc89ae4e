#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>
namespace std_msgs::msg {
struct Header {
  std::string frame_id;
};
}  // namespace std_msgs::msg
namespace sensor_msgs::msg {
struct Image {
  using ConstSharedPtr = std::shared_ptr<const Image>;
  std_msgs::msg::Header header;
  uint32_t height = 0, width = 0, step = 0;
  std::string encoding;
  std::vector<uint8_t> data;
};
}  // namespace sensor_msgs::msg
