//! Rows of `show stat`, as tools read them.

use super::*;
use longsplice_proxy::Totals;
use std::collections::{BTreeMap, BTreeSet};

fn listener(name: &str, protocol: &'static str) -> ListenerValues {
    let ended = BTreeMap::from([("closed", 3), ("denied", 2), ("bad-request", 1)]);
    ListenerValues {
        name: name.into(),
        listen: ([192, 0, 2, 1], 80).into(),
        protocol,
        spliced: 0,
        refused: BTreeMap::new(),
        is_paused: false,
        live: 4,
        begun: 10,
        max_connections: None,
        totals: Totals { ended, bytes_up: 11, bytes_down: 12, ..Totals::default() },
    }
}

fn member(address: &str, state: &'static str, backup: bool) -> MemberValues {
    let (address, max_connections) = (address.into(), backup.then_some(9));
    let (weight, configured_weight) = (3, 2);
    MemberValues {
        address,
        state,
        backup,
        weight,
        configured_weight,
        connections: 1,
        max_connections,
        chosen: 5,
        failed: 6,
    }
}

fn pool(name: &str, members: Vec<MemberValues>) -> PoolValues {
    PoolValues { name: name.into(), waiting: 7, members }
}

const WHOLE: Whole = Whole { max_connections: 100, is_stopping: false };

/// The columns of a row that have something.
fn filled(row: &Row) -> BTreeMap<&'static str, String> {
    let csv = row.csv();
    let values: Vec<&str> = csv.strip_suffix(",\n").unwrap().split(',').collect();
    assert_eq!(values.len(), COLUMNS.len(), "{csv}");
    let all = COLUMNS.into_iter().zip(values).filter(|(_, value)| !value.is_empty());
    all.map(|(name, value)| (name, value.to_owned())).collect()
}

fn read(line: &str) -> BTreeMap<&str, String> {
    line.split(' ').map(|pair| pair.split_once('=').unwrap()).map(|(key, value)| (key, value.to_owned())).collect()
}

#[test]
fn rows_have_what_is_counted_and_nothing_else() {
    let listeners = [listener("front", "plug"), listener("site", "http")];
    let pools =
        [pool("db", vec![member("a:1", "up", false), member("b:1", "drained", false), member("c:1", "up", true)])];
    let rows = rows(&proxies(&listeners, &pools), WHOLE, &Stat::default());
    let all: Vec<_> = rows.iter().map(filled).collect();
    let front = "pxname=front svname=FRONTEND scur=4 slim=100 stot=10 bin=11 bout=12 dreq=2 ereq=1 status=OPEN pid=1 iid=2 \
                 sid=0 type=0 mode=tcp conn_tot=10";
    assert_eq!(all[0], read(front));
    let site = front.replace("front", "site").replace("dreq=2 ", "").replace("tcp", "http").replace("iid=2", "iid=3");
    assert_eq!(all[1], read(&site));
    let server = "pxname=db svname=a:1 scur=1 stot=5 econ=6 status=UP weight=3 act=1 bck=0 pid=1 iid=4 sid=1 lbtot=5 type=2 \
                  addr=a:1 uweight=3";
    assert_eq!(all[2], read(server));
    assert_eq!(all[3], read(&server.replace("a:1", "b:1").replace("UP", "DRAIN").replace("sid=1", "sid=2")));
    let backup = server.replace("a:1", "c:1").replace("sid=1", "sid=3").replace("act=1 bck=0", "act=0 bck=1");
    assert_eq!(all[4], read(&format!("{backup} slim=9")));
    let backend = "pxname=db svname=BACKEND qcur=7 scur=3 stot=15 econ=18 status=UP weight=3 act=1 bck=1 pid=1 iid=4 sid=0 \
                   lbtot=15 type=1";
    assert_eq!(all[5], read(backend));
    assert_eq!(all.len(), 6);
}

#[test]
fn states_are_haproxys() {
    let status = |listener: ListenerValues, whole| filled(&frontend(2, &listener, whole))["status"].clone();
    assert_eq!(status(listener("front", "plug"), Whole { is_stopping: true, ..WHOLE }), "STOP");
    assert_eq!(status(ListenerValues { max_connections: Some(4), ..listener("front", "plug") }, WHOLE), "FULL");
    assert_eq!(status(listener("front", "plug"), Whole { max_connections: 4, ..WHOLE }), "FULL");
    let states =
        ["up", "out", "down", "drained", "maintenance"].map(|state| super::status(&member("a:1", state, false)));
    assert_eq!(states, ["UP", "DOWN", "DOWN", "DRAIN", "MAINT"]);
    let of = |states: &[(&'static str, bool)]| {
        let members = states.iter().map(|(state, backup)| member("a:1", state, *backup)).collect();
        let row = filled(&backend(2, &pool("db", members)));
        [&row["status"], &row["weight"], &row["act"], &row["bck"]].map(String::clone)
    };
    assert_eq!(of(&[("down", false), ("up", true)]), ["UP", "3", "0", "1"], "the backup has all of it");
    assert_eq!(of(&[("drained", false), ("out", true)]), ["DOWN", "0", "0", "0"]);
}

#[test]
fn rows_are_chosen() {
    let listeners = [listener("db", "plug"), listener("front", "plug")];
    let members = vec![member("a:1", "up", false), member("b:1", "maintenance", false), member("c:1", "down", false)];
    let pools = [pool("db", members), pool("idle", vec![member("d:1", "down", false)])];
    let proxies = proxies(&listeners, &pools);
    let names = |asked: Stat| -> Vec<String> {
        let all = rows(&proxies, WHOLE, &asked);
        all.iter().map(filled).map(|row| format!("{}/{}", row["iid"], row["svname"])).collect()
    };
    let all = ["2/FRONTEND", "2/a:1", "2/b:1", "2/c:1", "2/BACKEND", "3/FRONTEND", "4/d:1", "4/BACKEND"];
    assert_eq!(names(Stat::default()), all, "a listener and a pool of one name are one proxy");
    assert_eq!(names(Stat { kinds: 1, ..Stat::default() }), ["2/FRONTEND", "3/FRONTEND"]);
    assert_eq!(names(Stat { kinds: 2, ..Stat::default() }), ["2/BACKEND", "4/BACKEND"]);
    let of = |name| Stat { of: Some(name), ..Stat::default() };
    assert_eq!(names(of(Name::Called("idle".into()))), ["4/d:1", "4/BACKEND"]);
    assert_eq!(names(Stat { kinds: 4, sid: Some(2), ..of(Name::Numbered(2)) }), ["2/b:1"]);
    assert!(names(of(Name::Numbered(9))).is_empty());
    assert_eq!(names(Stat { only_up: true, ..Stat::default() }), ["2/FRONTEND", "2/a:1", "2/BACKEND", "3/FRONTEND"]);
    assert_eq!(names(Stat { kinds: 4, no_maint: true, ..Stat::default() }), ["2/a:1", "2/c:1", "4/d:1"]);
}

#[test]
fn names_with_commas_are_quoted() {
    let row = backend(2, &pool("a,\"b", Vec::new()));
    assert!(row.csv().starts_with("\"a,\"\"b\",BACKEND,7,,0,"), "{}", row.csv());
}

/// As Debian's HAProxy 2.6 writes them.
#[test]
fn other_formats() {
    let row = backend(4, &pool("db", vec![member("a:1", "up", false)]));
    let typed = Form { format: Format::Typed, described: false };
    let lines = row.write(typed, true);
    assert!(lines.starts_with("B.4.0.0.pxname.1:KNS:str:db\nB.4.0.1.svname.1:KNS:str:BACKEND\n"), "{lines}");
    assert!(lines.contains("B.4.0.18.weight.1:MaP:u32:3\n"), "{lines}");
    let described = row.write(Form { described: true, ..typed }, true);
    assert!(described.starts_with("B.4.0.0.pxname.1:KNS:str:db:\"Name of the listener or pool\"\n"), "{described}");
    let json = Form { format: Format::Json, described: false };
    let text = format!("{}{}{}{}", begin(json), row.write(json, true), row.write(json, false), end(json));
    let read: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(read.as_array().unwrap().len(), 2);
    let weight = read[1].as_array().unwrap().iter().find(|field| field["field"]["name"] == "weight").unwrap();
    let want = json!({
        "objType": "Backend", "proxyId": 4, "id": 0, "field": { "pos": 18, "name": "weight" }, "processNum": 1,
        "tags": { "origin": "Metric", "nature": "Avg", "scope": "Process" }, "value": { "type": "u32", "value": 3 },
    });
    assert_eq!(*weight, want);
}

#[test]
fn fields_stand_where_haproxy_has_them() {
    assert_eq!(COLUMNS.iter().collect::<BTreeSet<_>>().len(), COLUMNS.len());
    let (listeners, pools) = ([listener("db", "plug")], [pool("db", vec![member("a:1", "up", true)])]);
    for row in rows(&proxies(&listeners, &pools), WHOLE, &Stat::default()) {
        assert!(row.fields.is_sorted_by_key(|(field, _)| field.at), "{row:?}");
        row.fields.iter().for_each(|(field, _)| assert_eq!(COLUMNS[field.at], field.name));
    }
    assert!(
        begin(Form::default()).starts_with("# pxname,svname,qcur,")
            && begin(Form::default()).ends_with("check_status,\n")
    );
}
