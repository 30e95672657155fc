//! The program `longsplice`. All of it is in the library, which `longsplice-bench` uses too.

fn main() -> std::process::ExitCode {
    longsplice::main()
}
