# An archive and a package of Debian, as scripts/dist_cpp.sh makes them: VTX_DIST has lib/ and licences/ of what goes along,
# which libvtx finds in the folder vtx beside itself.
set_target_properties(vtx PROPERTIES INSTALL_RPATH "$ORIGIN/vtx")
install(DIRECTORY ${VTX_DIST}/lib/ DESTINATION ${CMAKE_INSTALL_LIBDIR}/vtx FILE_PERMISSIONS OWNER_READ OWNER_WRITE
                                                                          GROUP_READ WORLD_READ)
set(documents share/doc/vtx)
install(DIRECTORY ${VTX_DIST}/licences/ DESTINATION ${documents}/licences)
install(FILES ../../LICENSE DESTINATION ${documents} RENAME copyright)
install(DIRECTORY ../../examples/cpp DESTINATION ${documents}/examples)

set(CPACK_PACKAGE_NAME vtx)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_PACKAGE_FILE_NAME vtx-${PROJECT_VERSION}-linux-${VTX_DIST_ARCHITECTURE})
set(CPACK_GENERATOR TGZ DEB)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_CONTACT "The vtx authors <noreply@invalid>")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libs)
string(REGEX REPLACE "^x86_64$" amd64 CPACK_DEBIAN_PACKAGE_ARCHITECTURE ${VTX_DIST_ARCHITECTURE})
string(REGEX REPLACE "^aarch64$" arm64 CPACK_DEBIAN_PACKAGE_ARCHITECTURE ${CPACK_DEBIAN_PACKAGE_ARCHITECTURE})
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6 (>= ${VTX_DIST_GLIBC}), libstdc++6 (>= 12), libgcc-s1")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_LIST_DIR}/triggers)
include(CPack)
