"""Device presets: one TOML file a device. `vtx.runtime.host.profiles` reads them; every figure names its source."""
