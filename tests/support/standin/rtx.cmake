# TensorRT-RTX's headers come with its SDK alone. For the tests, those of a release of TensorRT become what stands in for
# them: another version, and what the plug-in calls of RTX. They say nothing about RTX's virtual tables.
function(vtx_standin_rtx from to)
  file(COPY ${from}/ DESTINATION ${to})
  file(READ ${from}/NvInferVersion.h text)
  string(REGEX REPLACE "TRT_([A-Z]+)_ENTERPRISE" "TRT_\\1_RTX" text "${text}")
  foreach(part "MAJOR;1" "MINOR;7" "PATCH;1" "BUILD;0")
    list(GET part 0 name)
    list(GET part 1 number)
    string(REGEX REPLACE "define TRT_${name}_RTX [0-9]+" "define TRT_${name}_RTX ${number}" text "${text}")
  endforeach()
  file(WRITE ${to}/NvInferVersion.h "${text}")
  file(READ ${from}/NvInferImpl.h text)
  string(REPLACE "class IRuntimeConfig;" "class IRuntimeConfig;
class IRuntimeCache;
enum class CudaGraphStrategy : int32_t { kDISABLED = 0, kWHOLE_GRAPH_CAPTURE = 1 };" text "${text}")
  set(last "virtual ExecutionContextAllocationStrategy getExecutionContextAllocationStrategy() const noexcept = 0;")
  string(REPLACE "${last}" "${last}
    virtual bool setCudaGraphStrategy(CudaGraphStrategy strategy) noexcept = 0;
    virtual IRuntimeCache* createRuntimeCache() noexcept = 0;
    virtual bool setRuntimeCache(IRuntimeCache& cache) noexcept = 0;" text "${text}")
  file(WRITE ${to}/NvInferImpl.h "${text}")
  file(READ ${from}/NvInferRuntime.h text)
  string(REPLACE "class IRuntimeConfig : public INoCopy" "class IRuntimeCache
{
public:
    virtual ~IRuntimeCache() noexcept = default;
    virtual bool deserialize(void const* blob, size_t size) noexcept = 0;
    virtual IHostMemory* serialize() const noexcept = 0;
};
class IRuntimeConfig : public INoCopy" text "${text}")
  string(REPLACE "protected:
    apiv::VRuntimeConfig* mImpl;" "    bool setCudaGraphStrategy(CudaGraphStrategy strategy) noexcept { return mImpl->setCudaGraphStrategy(strategy); }
    IRuntimeCache* createRuntimeCache() noexcept { return mImpl->createRuntimeCache(); }
    bool setRuntimeCache(IRuntimeCache& cache) noexcept { return mImpl->setRuntimeCache(cache); }

protected:
    apiv::VRuntimeConfig* mImpl;" text "${text}")
  file(WRITE ${to}/NvInferRuntime.h "${text}")
endfunction()
