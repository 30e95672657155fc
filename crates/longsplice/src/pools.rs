//! Pools of servers and what operators tell them: `longsplice pools`, `drain`, `undrain` and `weight`.

use crate::{Outcome, client::Client, control::Ask};
use serde::Deserialize;
use serde_json::Value;
use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

#[derive(Deserialize)]
struct Pool {
    name: String,
    waiting: u32,
    members: Vec<Member>,
}

#[derive(Deserialize)]
struct Member {
    address: String,
    state: String,
    backup: bool,
    weight: u32,
    connections: u32,
    max_connections: Option<u32>,
    chosen: u64,
    failed: u64,
}

/// `longsplice pools`.
pub fn pools(control: Option<&Path>, json: bool) -> Outcome {
    let mut answer = Client::connect(control)?.ask(Ask::Pools)?;
    let mut out = io::stdout().lock();
    if json {
        let pools = answer.get("pools").ok_or("no pools in the answer")?;
        writeln!(out, "{pools}")?;
        return Ok(ExitCode::SUCCESS);
    }
    let pools: Vec<Pool> = serde_json::from_value(answer.get_mut("pools").map(Value::take).unwrap_or_default())?;
    let name = |pool: &Pool, member: &Member| format!("{}/{}", pool.name, member.address);
    let names = pools.iter().flat_map(|pool| pool.members.iter().map(move |member| name(pool, member).chars().count()));
    let width = names.max().unwrap_or(0).max("SERVER".len());
    writeln!(
        out,
        "{:<width$}  {:<11}  {:>6}  {:>11}  {:>12}  {:>10}",
        "SERVER", "STATE", "WEIGHT", "CONNECTIONS", "CHOSEN", "FAILED"
    )?;
    for pool in &pools {
        for member in &pool.members {
            let Member { state, weight, connections, chosen, failed, .. } = member;
            let most = member.max_connections.map_or_else(String::new, |most| format!("/{most}"));
            let backup = if member.backup { "  backup" } else { "" };
            writeln!(
                out,
                "{:<width$}  {state:<11}  {weight:>6}  {:>11}  {chosen:>12}  {failed:>10}{backup}",
                name(pool, member),
                format!("{connections}{most}"),
            )?;
        }
        if pool.waiting > 0 {
            writeln!(out, "{}: {} wait", pool.name, pool.waiting)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `longsplice drain`, `longsplice undrain` and `longsplice weight`.
pub fn tell(control: Option<&Path>, ask: Ask) -> Outcome {
    Client::connect(control)?.ask(ask)?;
    Ok(ExitCode::SUCCESS)
}
