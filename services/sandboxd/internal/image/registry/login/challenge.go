package login

import (
	"net/http"
	"strings"
)

// challenge is one way to authenticate that a server offers (RFC 9110, section 11.6.1).
type challenge struct {
	scheme string // lower case
	params map[string]string
}

// parseChallenges reads all challenges of a response, also several in one header line.
// Parts that make no sense are left out.
func parseChallenges(h http.Header) []challenge {
	var out []challenge
	for _, line := range h.Values("WWW-Authenticate") {
		p := challengeParser{rest: line}
		out = append(out, p.all()...)
	}
	return out
}

type challengeParser struct {
	rest string
}

func (p *challengeParser) all() (out []challenge) {
	for p.skip(" \t,"); p.rest != ""; p.skip(" \t,") {
		word := p.token()
		if word == "" {
			return out
		}
		p.skip(" \t")
		if !strings.HasPrefix(p.rest, "=") {
			out = append(out, challenge{scheme: strings.ToLower(word), params: map[string]string{}})
			continue
		}
		p.rest = p.rest[1:]
		p.skip(" \t")
		value, ok := p.value()
		if !ok {
			return out
		}
		if len(out) > 0 {
			out[len(out)-1].params[strings.ToLower(word)] = value
		}
	}
	return out
}

func (p *challengeParser) skip(set string) { p.rest = strings.TrimLeft(p.rest, set) }

func (p *challengeParser) token() string {
	end := strings.IndexAny(p.rest, " \t,=\"")
	if end < 0 {
		end = len(p.rest)
	}
	word := p.rest[:end]
	p.rest = p.rest[end:]
	return word
}

func (p *challengeParser) value() (string, bool) {
	if !strings.HasPrefix(p.rest, `"`) {
		end := strings.IndexAny(p.rest, " \t,")
		if end < 0 {
			end = len(p.rest)
		}
		v := p.rest[:end]
		p.rest = p.rest[end:]
		return v, true
	}
	var b strings.Builder
	for i := 1; i < len(p.rest); i++ {
		switch c := p.rest[i]; c {
		case '\\':
			if i++; i < len(p.rest) {
				b.WriteByte(p.rest[i])
			}
		case '"':
			p.rest = p.rest[i+1:]
			return b.String(), true
		default:
			b.WriteByte(c)
		}
	}
	return "", false
}
