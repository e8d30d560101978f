//! Extensions of devices that applications are told of.

/// Extensions that only concern kernels, or that this driver knows how to pass on. Others have
/// entry points that do not travel.
pub fn passes(extension: &str) -> bool {
    let known = [
        "cl_khr_byte_addressable_store",
        "cl_khr_fp16",
        "cl_khr_fp64",
        "cl_khr_int64_base_atomics",
        "cl_khr_int64_extended_atomics",
        "cl_khr_global_int32_base_atomics",
        "cl_khr_global_int32_extended_atomics",
        "cl_khr_local_int32_base_atomics",
        "cl_khr_local_int32_extended_atomics",
        "cl_khr_3d_image_writes",
        "cl_khr_spir",
        "cl_khr_subgroups",
        "cl_khr_expect_assume",
        "cl_khr_extended_bit_ops",
        "cl_khr_integer_dot_product",
        "cl_khr_device_uuid",
        "cl_khr_pci_bus_info",
        "cl_khr_select_fprounding_mode",
        "cl_nv_compiler_options",
        "cl_nv_device_attribute_query",
        "cl_nv_pragma_unroll",
        "cl_nv_copy_opts",
    ];
    known.contains(&extension)
        || extension.starts_with("cl_khr_subgroup_")
        || extension.starts_with("cl_ext_float_atomics")
}
