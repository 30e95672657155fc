#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| longsplice_properties::check("haproxy", input));
