//! The program `longsplice`. The code is in the library, which `longsplice-bench` uses too.

fn main() -> std::process::ExitCode {
    longsplice::main()
}
