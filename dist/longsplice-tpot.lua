-- SPDX-License-Identifier: Apache-2.0 OR MIT
--
-- Shows the TCP option of translucent proxying (docs/tpot.md) in Wireshark and tshark, in plain packets and in tunnels:
--
--	wireshark -X lua_script:longsplice-tpot.lua
--	tshark -X lua_script:longsplice-tpot.lua -Y tpot
--
-- or copy it into the directory of personal Lua plugins that "About Wireshark, Folders" names. Only SYNs and SYN-ACKs have the
-- option. An option that a receiver takes for none is shown with the reason. MACs are shown, and not verified. Tunnels in UDP are
-- those to port 6080.

local tpot = Proto("tpot", "Translucent proxying (TPOT)")

local messages = { [0] = "question (SYN)", [1] = "answer (SYN-ACK)" }
local fields = {
	message = ProtoField.uint8("tpot.message", "Message", base.DEC, messages),
	kind = ProtoField.uint8("tpot.kind", "Kind"),
	length = ProtoField.uint8("tpot.length", "Length"),
	exid = ProtoField.uint16("tpot.exid", "ExID", base.HEX),
	version = ProtoField.uint8("tpot.version", "Version"),
	hops = ProtoField.uint8("tpot.hops", "Hops: proxies that may still intercept"),
	capabilities = ProtoField.uint16("tpot.capabilities", "Capabilities", base.HEX),
	mac = ProtoField.bytes("tpot.mac", "MAC"),
}
tpot.fields = fields
local ignored =
	ProtoExpert.new("tpot.ignored", "Receivers take this option for none", expert.group.PROTOCOL, expert.severity.WARN)
tpot.experts = { ignored }
tpot.prefs.exid = Pref.uint("ExID", 0x7470, "Identifier of the option (RFC 6994), as --exid of longsplice tpot host")

-- A postdissector, since the option lies in what the dissector of TCP has read already. A packet may have several TCP headers:
-- in a tunnel, or quoted by ICMP.
local all_options, all_flags = Field.new("tcp.options"), Field.new("tcp.flags")

local function show(option, answers, tree)
	local length = option:len()
	local branch = tree:add(tpot, option)
	branch:add(fields.message, option(0, 0), answers and 1 or 0):set_generated()
	branch:add(fields.kind, option(0, 1))
	branch:add(fields.length, option(1, 1))
	branch:add(fields.exid, option(2, 2))
	local odd
	if length ~= 8 and not (length == 16 and answers) then
		odd = "length"
	else
		branch:add(fields.version, option(4, 1))
		odd = option(4, 1):uint() ~= 1 and "version" or option(0, 1):uint() ~= 253 and "kind"
	end
	if odd then
		branch:add_proto_expert_info(ignored, "Receivers take an option of this " .. odd .. " for none")
		return
	end
	branch:add(fields.hops, option(5, 1))
	branch:add(fields.capabilities, option(6, 2))
	if length == 16 then
		branch:add(fields.mac, option(8, 8))
	end
end

-- The options of one TCP header (RFC 9293, 3.1).
local function walk(options, answers, tree)
	local at, length = 0, options:len()
	while at < length do
		local kind = options(at, 1):uint()
		if kind == 0 then
			return
		end
		local size = 1
		if kind ~= 1 then
			size = at + 1 < length and options(at + 1, 1):uint() or 0
			if size < 2 or at + size > length then
				return -- malformed, which the dissector of TCP has said
			end
			if (kind == 253 or kind == 254) and size >= 4 and options(at + 2, 2):uint() == tpot.prefs.exid then
				show(options(at, size), answers, tree)
			end
		end
		at = at + size
	end
end

function tpot.dissector(_, _, tree)
	local flags = { all_flags() }
	for _, options in ipairs({ all_options() }) do
		-- those of the same header are the last before the options
		local of = 0
		for _, f in ipairs(flags) do
			of = f.offset < options.offset and f.value or of
		end
		local syn, ack = math.floor(of / 2) % 2 == 1, math.floor(of / 16) % 2 == 1
		if syn then
			walk(options.range, ack, tree)
		end
	end
end

register_postdissector(tpot)

-- Tunnels in UDP: an IP packet follows the header.
local tunnel = Proto("tpot_udp", "Translucent proxying (TPOT), tunnel in UDP")

function tunnel.dissector(content, packet, tree)
	local names = { [4] = "ip", [6] = "ipv6" }
	local name = content:len() > 0 and names[math.floor(content(0, 1):uint() / 16)]
	if not name then
		return 0
	end
	return Dissector.get(name):call(content, packet, tree)
end

DissectorTable.get("udp.port"):add(6080, tunnel)
