// Stands for an extension module of Python that needs libtorch.
extern "C" bool fake_torch_is_initialised();
extern "C" bool fake_extension_works() { return fake_torch_is_initialised(); }
