// Version of the plugin's node contract; the loader compares it before it registers the library.
extern "C" __attribute__((visibility("default"))) int castline_plugin_version() { return 1; }
