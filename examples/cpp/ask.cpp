// Answers questions about a picture: ask BUNDLE IMAGE QUESTION [QUESTION ...]
#include <iostream>

#include <vtx/vtx.hpp>

int main(int count, char** values) {
  if (count < 4) {
    std::cerr << "Usage: ask BUNDLE IMAGE QUESTION [QUESTION ...]\n";
    return 2;
  }
  try {
    vtx::Model model(values[1]);
    vtx::Conversation picture = model.open({vtx::Image::file(values[2])});
    for (int i = 3; i < count; ++i) {  // from the second question on, the image is not run again
      vtx::Answer answer = picture.ask(values[i], {}, [](std::string_view text) {
        std::cout << text << std::flush;
        return true;
      });
      std::cout << "  (" << answer.ids().size() << " tokens)\n";
    }
    return 0;
  } catch (const vtx::Error& error) {
    std::cerr << "Error: " << error.what() << "\n";
    return 1;
  }
}
