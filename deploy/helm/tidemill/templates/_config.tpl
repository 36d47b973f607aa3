{{- /* The configuration file of `tidemill serve`, from values. */ -}}

{{- define "tidemill.models" -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $groups := list -}}
{{- range .groups -}}
{{- $own := dict "labels" (dict "tidemill-group" .name) "resources" (dict (printf "tidemill-%s-ranks" .name) 1) -}}
{{- $groups = append $groups (mergeOverwrite (deepCopy (omit . "name" "pod")) $own) -}}
{{- end -}}
{{- $models = append $models (mergeOverwrite (deepCopy .) (dict "groups" $groups)) -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}

{{- define "tidemill.storeUrl" -}}
{{- if .Values.store.url -}}
{{- .Values.store.url -}}
{{- else -}}
{{- $tiers := list -}}
{{- with .Values.store.folder.size -}}
{{- $tiers = append $tiers (printf "file:///var/lib/tidemill/pages?size=%s" .) -}}
{{- end -}}
{{- if .Values.mooncake.enabled -}}
{{- $tiers = append $tiers (include "tidemill.masterUrl" .) -}}
{{- end -}}
{{- join "," $tiers -}}
{{- end -}}
{{- end -}}

{{- define "tidemill.config" -}}
{{- $ports := fromYaml (include "tidemill.ports" .) -}}
# Made by the chart: change values, not this file.
models:
  {{- include "tidemill.models" . | nindent 2 }}
store:
  url: {{ include "tidemill.storeUrl" . | quote }}
  {{- if .Values.store.secret.existingSecret }}
  secret_file: /etc/tidemill/store/secret
  {{- end }}
edge:
  host: 0.0.0.0
  port: {{ $ports.http | int64 }}
  {{- if .Values.frontend.grpc }}
  grpc_port: {{ $ports.grpc | int64 }}
  {{- end }}
  send_timeout: {{ .Values.frontend.send_timeout }}
  {{- if include "tidemill.keysSecret" . }}
  api_keys_file: /etc/tidemill/keys/keys.yaml
  {{- end }}
  {{- if .Values.edgeTls.existingSecret }}
  ssl_certfile: /etc/tidemill/tls/tls.crt
  ssl_keyfile: /etc/tidemill/tls/tls.key
  {{- if .Values.edgeTls.clientCa }}
  ssl_ca_certs: /etc/tidemill/tls/ca.crt
  {{- end }}
  {{- end }}
cluster:
  ray_address: auto
  {{- if .Values.clusterTls.plain }}
  host: node-plain
  {{- else }}
  host: node
  ssl_certfile: /etc/tidemill/cluster-tls/tls.crt
  ssl_keyfile: /etc/tidemill/cluster-tls/tls.key
  ssl_ca_certs: /etc/tidemill/cluster-tls/ca.crt
  {{- end }}
telemetry:
  {{- toYaml .Values.telemetry | nindent 2 }}
{{- end -}}

{{- define "tidemill.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.keys -}}
{{- include "tidemill.fullname" . }}-api-keys
{{- end -}}
{{- end -}}
